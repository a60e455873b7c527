"""Real nodes whose shards go wrong after loading, each a process of its own.

``python -m tests.node.faulty_node JSON``, where JSON gives the arguments of ``meshnet node`` by
node id, and the fault of each: ``{"a": ["theta", "--model", ...]}``. The files, and what such a
node says of them, are right: only its probes can tell. torch is imported once, and forked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from meshnet.cli.main import main
from meshnet_node.hf.shard import TransformersShard

_TOLD: list[TransformersShard] = []


def _theta(shard: TransformersShard) -> None:
    """Rotate as a tenth of the model's rope_theta would."""
    rotary = shard._shard.decoder.rotary_emb
    theta = shard._shard.config.rope_parameters["rope_theta"]
    exponents = torch.arange(0, 2 * len(rotary.inv_freq), 2) / (2 * len(rotary.inv_freq))
    rotary.inv_freq.copy_((theta / 10) ** -exponents)


def _epsilon(shard: TransformersShard) -> None:
    for layer in shard._window._layers:
        for module in layer.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon *= 10


def _float16(shard: TransformersShard) -> None:
    """Compute in float16, as a node on another kind of machine might."""
    shard._shard = replace(shard._shard, dtype=torch.float16)
    shard._shard.model.half()
    for layer in shard._window._layers:
        layer.half()


def _shift(shard: TransformersShard) -> None:
    """Run each layer in the place of the one before."""
    window = shard._window
    window._layers = [*window._layers[1:], window._layers[0]]
    places = {
        module: shard.spec.layers.start + index
        for index, layer in enumerate(window._layers)
        for module in layer.modules()
    }
    window._indexed = [(module, name, places[module]) for module, name, _ in window._indexed]
    window._active = None


def _bit(shard: TransformersShard) -> None:
    """Flip the lowest bit of one weight: far below what any tolerance can see."""
    module = next(
        each for each in shard._window._layers[1].modules() if isinstance(each, nn.Linear)
    )
    weight = module.weight.data.clone()  # the file's own pages are shared
    weight.view(torch.int16)[0, 0] ^= 1
    module.weight.data = weight


def _late_bit(shard: TransformersShard) -> None:
    """Flip a bit when told by SIGUSR1, and back when told again."""
    _TOLD.append(shard)


FAULTS: dict[str, Callable[[TransformersShard], None]] = {
    "theta": _theta,
    "epsilon": _epsilon,
    "float16": _float16,
    "shift": _shift,
    "bit": _bit,
    "late-bit": _late_bit,
    "none": lambda _: None,
}


def _go_wrong(fault: Callable[[TransformersShard], None]) -> None:
    load = TransformersShard.__init__

    def load_and_go_wrong(shard: TransformersShard, *args: object, **kwargs: object) -> None:
        load(shard, *args, **kwargs)
        fault(shard)

    TransformersShard.__init__ = load_and_go_wrong


def _start(fault: str, arguments: list[str]) -> int:
    """Fork a node; gives its process id."""
    child = os.fork()
    if child:
        return child
    _go_wrong(FAULTS[fault])
    signal.signal(signal.SIGUSR1, lambda *_: [_bit(shard) for shard in _TOLD])
    main(["node", *arguments, "--json", "--exit-with-parent"])
    raise SystemExit


if __name__ == "__main__":
    torch.set_num_threads(1)
    nodes = json.loads(sys.argv[1])
    for node_id, (fault, *arguments) in nodes.items():
        started = _start(fault, ["--id", node_id, *arguments])
        print(json.dumps({"event": "started", "node": node_id, "pid": started}), flush=True)
    for _ in nodes:
        os.wait()
