"""Loading a part of a model takes a part of its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from meshnet.topology import LayerRange
from meshnet_node.hf.exact import save_random_model
from tests.node.tiny import save_tiny

LAYERS = 12

# Runs in a fresh process: loads a small shard first, so that libraries are warm, then the
# one to measure, and prints in bytes what it added.
MEASURE = """
import gc, json, sys
from pathlib import Path
from meshnet.topology import LayerRange
from meshnet_node.hf.shard import TransformersShard

def status(name):
    line = next(l for l in open("/proc/self/status") if l.startswith(name + ":"))
    return int(line.split()[1]) * 1024

small, directory, start, end, dtype = sys.argv[1:]
TransformersShard(Path(small), LayerRange(0, 5), model="m", digest="", dtype=dtype, threads=1)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
before = {name: status(name) for name in ("VmRSS", "RssAnon", "VmHWM")}
shard = TransformersShard(
    Path(directory), LayerRange(int(start), int(end)), model="m", digest="", dtype=dtype, threads=1
)
weights = sum(p.nbytes for p in shard._shard.model.parameters())
print(json.dumps({
    "weights": weights,
    "resident": status("VmRSS") - before["VmRSS"],
    "anonymous": status("RssAnon") - before["RssAnon"],
    "peak": status("VmHWM") - before["VmRSS"],
}))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """116 MB: 12 layers of 8.4 MB, an embedding and a head of 8.2 MB each."""
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
    )
    return save_random_model(config, tmp_path_factory.mktemp("large"))


def start(small: Path, large: Path, layers: LayerRange, dtype: str) -> subprocess.Popen[str]:
    arguments = [str(small), str(large), str(layers.start), str(layers.end), dtype]
    return subprocess.Popen(
        [sys.executable, "-c", MEASURE, *arguments], stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return {name: int(value) for name, value in json.loads(output).items()}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_in_proportion_to_the_layers_held(small: Path, large: Path, dtype: str) -> None:
    processes = [
        start(small, large, layers, dtype) for layers in (LayerRange(4, 8), LayerRange(0, LAYERS))
    ]
    part, whole = map(finish, processes)
    assert whole["weights"] > 100e6
    assert part["weights"] < 0.34 * whole["weights"]
    # The measure sees the weights at all:
    assert whole["resident"] > 0.9 * whole["weights"]
    assert part["resident"] < 0.45 * whole["resident"]
    assert part["peak"] < 0.45 * whole["peak"]
    if dtype == "bfloat16":
        # As saved: the weights are pages of the file, which the system can drop again.
        assert part["anonymous"] < 0.5 * part["weights"]
