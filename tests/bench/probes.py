"""False alarms: probes of bfloat16 and float32 shards, on 1 and 2 threads and other kernels.

Half of the probes are of the model given, in shards of a third of its layers; the other half of
tiny models with random weights, of every family that the tests know. Every one is judged as
the control plane does, by one reference, and as the node itself does, by its first probe.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from meshnet.cli.bench.report import Report, Run, Table
from meshnet.model_dir import read_model_dir
from meshnet.probes import Reference, judge
from meshnet.topology import LayerRange
from meshnet_node.hf.reference import make_reference
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.prober import Prober
from meshnet_node.scheduler import Scheduler
from tests.node.tiny import TINY, save_tiny

_PROBES = 1000
_DTYPES = ("bfloat16", "float32")
_NOTES = (
    "deviation: the largest of a probe's layers, as a part of what is allowed; 1 would be an alarm",
)


async def run(options: Run) -> Report:
    """Probe, and count what would have been quarantined."""
    report = Report("probes: false alarms", _NOTES)
    table = Table(
        "probes of shards as they should be",
        ("model", "computes in", "threads", "kernels", "probes", "alarms", "worst", "ms a probe"),
    )
    report.tables.append(table)
    num_probes = _PROBES // options.divisor
    with tempfile.TemporaryDirectory() as folder:
        tiny = [
            save_tiny(family, Path(folder, family))
            for family in TINY
            if not options.quick or family == "llama"
        ]
        groups = [tiny] if options.model is None else [tiny, [options.model]]
        for directories in groups:
            share = num_probes // len(groups)
            for row in _measure(directories, share):
                table.rows.append(row)
                table.data.append(dict(zip(table.columns, row, strict=True)))
    return report


def _measure(directories: list[Path], num_probes: int) -> Iterator[tuple[str, ...]]:
    shards = [
        (shard, Prober(shard, shard.weights, Scheduler(), interval_s=0.0), reference, layers)
        for directory in directories
        for shard, reference, layers in _shards(directory)
    ]
    settings = list(itertools.product(_DTYPES, (1, 2), (True, False)))
    name = directories[0].name if len(directories) == 1 else f"{len(directories)} tiny ones"
    for dtype, threads, has_onednn in settings:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = has_onednn  # type: ignore[assignment]  # a property
        alarms, worst, began = 0, 0.0, time.perf_counter()
        count = -(-num_probes // len(settings))
        of_dtype = [each for each in shards if each[0].weights.dtype == dtype]
        chosen = itertools.islice(itertools.cycle(of_dtype), count)
        for shard, prober, reference, layers in chosen:
            prober.run()
            assert prober.latest is not None
            verdict = judge(prober.latest.report, reference, layers, head=shard.spec.holds_head)
            alarms += bool(verdict.reason or prober.failure)
            worst = max(worst, verdict.worst)
        ms = (time.perf_counter() - began) * 1e3 / count
        kernels = "oneDNN" if has_onednn else "torch's own"
        yield (
            *(name, dtype, str(threads), kernels, str(count), str(alarms)),
            *(f"{worst:.3f}", f"{ms:.0f}"),
        )
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]  # a property
    torch.set_num_threads(1)


def _shards(directory: Path) -> Iterator[tuple[TransformersShard, Reference, LayerRange]]:
    num_layers = read_model_dir(directory).num_layers
    reference = make_reference(directory)
    borders = [num_layers * part // 3 for part in range(4)]
    for start, end in itertools.pairwise(borders):
        layers = LayerRange(start, end)
        for dtype in _DTYPES:
            yield (
                TransformersShard(directory, layers, model="m", digest="d", dtype=dtype),
                reference,
                layers,
            )
