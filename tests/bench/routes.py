"""Time of a route selection by the size of the mesh: 120 layers, up to 10,000 nodes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshnet.candidate import Candidate, Link, RouteQuery
from meshnet.cli.bench.measure import Series
from meshnet.cli.bench.report import Report, Run, Table
from meshnet.routing import RouteTable
from meshnet.topology import LayerRange, NodeId

NUM_LAYERS = 120
SIZES = (100, 300, 1_000, 3_000, 10_000)
QUICK_SIZES = (100, 300)
NUM_LINKS = 8
NUM_QUERIES = 20
QUERY = RouteQuery("models/m", wire_versions=(2,), expected_tokens=500)


async def run(options: Run) -> Report:
    """Measure selections on meshes of random shards, and on fleets of equal machines."""
    report = Report(
        "Route selection",
        notes=(
            f"{NUM_LAYERS} layers; a node holds 6 to 18 and measures {NUM_LINKS} links.",
            "select: a table that is ready. build: everything is new, then select.",
            "update: one node's load changed, as after a heartbeat, then select.",
            "varied: three regions, all figures random, one link in 50 slow.",
            "equal: one region, ten shard ranges, links slower than assumed of unmeasured ones.",
        ),
    )
    for name, make in (("varied", varied_mesh), ("equal", equal_mesh)):
        table = Table(
            f"{name} nodes, milliseconds",
            ("nodes", "hops", "select p50", "p99", "update p50", "build p50", "p50 / 1,000 nodes"),
        )
        for size in QUICK_SIZES if options.quick else SIZES:
            row = measure(make, size, options.rounds(5))
            table.data.append(row)
            table.rows.append(
                (
                    f"{size:,}",
                    str(row["hops"]),
                    *(f"{row[key]:.2f}" for key in ("select", "p99", "update", "build")),
                    f"{row['select'] * 1000 / size:.2f}",
                )
            )
        report.tables.append(table)
    return report


def measure(
    make: Callable[[random.Random, int], list[Candidate]], size: int, num_rounds: int
) -> Any:
    """Measure one size: each round is another mesh."""
    times: dict[str, list[list[float]]] = {"select": [], "update": [], "build": []}
    hops = 0
    for number in range(num_rounds):
        rng = random.Random(number)
        mesh = make(rng, size)
        rows: dict[str, list[float]] = {name: [] for name in times}
        start = time.perf_counter()
        table = RouteTable(mesh)
        hops = max(hops, len(table.select(QUERY)[0].stages))
        rows["build"].append((time.perf_counter() - start) * 1e3)
        for _ in range(NUM_QUERIES):
            query = replace(QUERY, assigned={mesh[rng.randrange(size)].node: 1})
            start = time.perf_counter()
            table.select(query)
            rows["select"].append((time.perf_counter() - start) * 1e3)
        for _ in range(NUM_QUERIES // 4):
            index = rng.randrange(size)
            mesh[index] = replace(mesh[index], load=mesh[index].load + 1)
            start = time.perf_counter()
            table = RouteTable(mesh, table)
            table.select(QUERY)
            rows["update"].append((time.perf_counter() - start) * 1e3)
        for name, values in rows.items():
            times[name].append(values)
    series = {name: Series(rounds) for name, rounds in times.items()}
    found = {name: each.median for name, each in series.items()}
    return {"nodes": size, "hops": hops, "p99": series["select"].percentile(99), **found}


def varied_mesh(rng: random.Random, size: int) -> list[Candidate]:
    """Give nodes of three regions with random ranges, speeds, loads and links."""
    nodes = []
    for index in range(size):
        length = rng.randint(6, 18)
        start = min(max(0, rng.randint(-length, NUM_LAYERS)), NUM_LAYERS - length)
        nodes.append(
            _node(
                index,
                LayerRange(start, start + length),
                region=rng.choice(("eu", "us", "asia")),
                load=rng.randint(0, 9),
                free_tokens=rng.randint(5_000, 90_000),
                layer_us=rng.randint(500, 3_000),
            )
        )
    return _linked(rng, nodes, lambda: 90_000 if rng.random() < 0.02 else rng.randint(200, 1_900))


def equal_mesh(rng: random.Random, size: int) -> list[Candidate]:
    """Give nodes that are alike but for their range, one of ten."""
    length = NUM_LAYERS // 10
    ranges = [LayerRange(index * length, (index + 1) * length) for index in range(10)]
    nodes = [_node(index, ranges[index % 10], layer_us=1_000) for index in range(size)]
    return _linked(rng, nodes, lambda: 3_000)


def _node(index: int, layers: LayerRange, **facts: Any) -> Candidate:
    return Candidate(
        NodeId(f"n{index}"),
        QUERY.model,
        "d",
        layers,
        NUM_LAYERS,
        embedding=layers.start == 0,
        lm_head=layers.end == NUM_LAYERS,
        wire_versions=(2,),
        **facts,
    )


def _linked(
    rng: random.Random, nodes: list[Candidate], rtt_us: Callable[[], int]
) -> list[Candidate]:
    """Let each node measure links to some that hold its next layer, in its region."""
    holders: dict[tuple[str, int], list[Candidate]] = {}
    for node in nodes:
        for layer in range(node.layers.start, node.layers.end):
            holders.setdefault((node.region, layer), []).append(node)
    linked = []
    for node in nodes:
        following = holders.get((node.region, node.layers.end), [])
        chosen = rng.sample(following, min(NUM_LINKS, len(following)))
        links = tuple(Link(other.node, rtt_us(), 10**9) for other in chosen)
        linked.append(replace(node, links=links))
    return linked
