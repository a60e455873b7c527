"""The reference of a model as a file beside its weights, in the JSON of the control plane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from google.protobuf import json_format

from meshnet.control.probe_messages import reference_of
from meshnet.errors import ConfigError, MeshError
from meshnet.model_dir import read_json
from meshnet.v1 import reference_service_pb2 as pb

__all__ = ["REFERENCE_FILE", "read_reference_file", "write_reference_file"]

REFERENCE_FILE: Final = "meshnet-reference.json"
_MAX_BYTES: Final = 16 << 20


def read_reference_file(directory: Path) -> pb.Reference | None:
    """Read the reference that lies in a model directory; None where there is none.

    Raises:
        ConfigError: the file is no reference, naming it and what is wrong.
    """
    path = directory / REFERENCE_FILE
    if not path.exists():
        return None
    value, _ = read_json(path, _MAX_BYTES)
    message = pb.Reference()
    try:
        json_format.ParseDict(value, message)
        reference_of(message)
    except (json_format.ParseError, MeshError) as error:
        raise ConfigError(f"{path}: no reference of a model: {error}", field=str(path)) from error
    return message


def write_reference_file(directory: Path, message: pb.Reference) -> Path:
    """Write a reference into a model directory; gives its path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / REFERENCE_FILE
    part = directory / f".{REFERENCE_FILE}.part"
    try:
        part.write_text(json.dumps(json_format.MessageToDict(message)) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field=str(path)) from error
    return path
