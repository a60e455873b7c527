"""The header of a GGUF file (`meshnet_node.gguf_header`)."""

from __future__ import annotations

import os
from pathlib import Path

from meshnet.errors import ConfigError
from meshnet_node.gguf_header import read_header
from tests.fuzz.targets.errors import check_error

FILE = os.memfd_create("gguf")
PATH = Path(f"/proc/self/fd/{FILE}")


def check(data: bytes) -> None:
    os.ftruncate(FILE, 0)
    os.pwrite(FILE, data, 0)
    try:
        header = read_header(PATH)
    except ConfigError as error:
        check_error(error)
        return
    for tensor in header.tensors:
        assert 0 <= tensor.start <= tensor.start + tensor.num_bytes <= len(data)
