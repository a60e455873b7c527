"""A model directory (`meshnet.model_dir`, `meshnet.model_weights`): JSON, index, safetensors.

The first byte says which file the rest is; the others stay as they are in a good model.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from meshnet.errors import MeshError
from meshnet.model_dir import read_model_dir
from meshnet.model_weights import (
    INDEX_FILE,
    WEIGHTS_FILE,
    model_digest,
    read_safetensors_header,
    read_weight_index,
)
from meshnet.topology import LayerRange
from meshnet_node.model_files import resolve_model, shard_files
from tests.fuzz.targets.errors import check_error

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "vocab_size": 8,
}
TENSORS = {
    "model.embed_tokens.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]},
    "model.layers.0.a.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [64, 72]},
    "model.layers.1.a.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [72, 80]},
}
HEADER = json.dumps(TENSORS).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(80)
INDEX = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(TENSORS, WEIGHTS_FILE)}).encode()
GOOD = {"config.json": json.dumps(CONFIG).encode(), "meshnet.json": b'{"name": "m"}'}
FILES = {b"c": "config.json", b"n": "meshnet.json", b"i": INDEX_FILE, b"w": WEIGHTS_FILE}

_shm = Path("/dev/shm")
_folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_shm if _shm.is_dir() else None))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
MODEL = _folder / "model"
MODEL.mkdir()
VIEWS = _folder / "views"


def check(data: bytes) -> None:
    name = FILES.get(data[:1], WEIGHTS_FILE)
    files = {**GOOD, WEIGHTS_FILE: WEIGHTS, name: data[1:]}
    for old in MODEL.iterdir():
        old.unlink()
    for file, content in files.items():
        (MODEL / file).write_bytes(content)
    try:
        if name == WEIGHTS_FILE:
            header = read_safetensors_header(MODEL / name)
            for tensor in header.values():
                assert 8 <= tensor.start <= tensor.start + tensor.num_bytes <= len(data) - 1
        shape = read_model_dir(MODEL)
        index = read_weight_index(MODEL)
        whole = LayerRange(0, shape.num_layers)
        for file in shard_files(index, whole, shape.num_layers):
            assert "/" not in file
        assert len(model_digest(MODEL)) == 64
        resolve_model(str(MODEL), cache_dir=VIEWS)
    except MeshError as error:
        check_error(error)
