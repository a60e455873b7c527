"""What operators type, against a real control plane: tables for people, JSON for machines."""

from __future__ import annotations

import asyncio
import json

import pytest
import typer
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from meshnet.cli import models, nodes, route, status
from meshnet.cli.models import coverage_bar
from meshnet.cli.watch import Follower
from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.errors import ConfigError, MeshError
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import route_service_pb2, types_pb2

NODE = pb.Node(incarnation=1, endpoints=[types_pb2.Endpoint(uri="http://127.0.0.1:7080/forward")])

app = typer.Typer()
app.add_typer(nodes.app, name="nodes")
app.command()(route.route)
app.command()(models.models)
app.command()(status.status)


@pytest.fixture
async def command(mesh, monkeypatch):
    """Give a function that runs a command line; two nodes share a model, one has all of it."""
    monkeypatch.setenv("COLUMNS", "200")
    await mesh.join("left", (0, 4), port=7081)
    await mesh.join("right", (4, 8), port=7082)
    await mesh.join("whole", (0, 8), port=7083)

    async def run(*arguments: str, fails: bool = False) -> Result:
        control = ("--control", f"grpc://{mesh.addresses.grpc}")
        result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *control])
        if not fails and result.exception is not None:
            raise result.exception
        return result

    return run


async def test_json_is_the_apis_own(command, mesh):
    for arguments, path in (
        (("nodes", "list"), "/v1/nodes"),
        (("nodes", "get", "left"), "/v1/nodes/left"),
        (("models",), "/v1/models"),
        (("status",), "/v1/status"),
    ):
        printed = json.loads((await command(*arguments, "--json")).stdout)
        assert (200, printed) == await mesh.json("GET", path)
    printed = json.loads((await command("route", "acme/tiny", "--explain", "--json")).stdout)
    body = {"model": "models/acme/tiny", "explain": True, "maxRoutes": 3}
    assert (200, printed) == await mesh.json("POST", "/v1/routes:select", json=body)


async def test_a_route_is_explained(command, mesh):
    await mesh.beat("whole", active_sessions=3)
    await command("nodes", "cordon", "left")
    shown = (await command("route", "acme/tiny", "--explain")).stdout
    assert "is the least of all chains" in shown
    assert "left out: left: cordoned" in shown
    rows = [line.split()[:2] for line in shown.splitlines()]
    assert [row[1] for row in rows if row[:1] in (["1"], ["2"])] == ["whole", "right"]
    await command("nodes", "uncordon", "left")
    shown = (await command("route", "acme/tiny", "--explain")).stdout
    first, *_ = [line for line in shown.splitlines() if line.split()[:1] == ["1"]]
    assert first.split()[:3] == ["1", "left", "0-4"]
    assert "2.0 (guess)" in shown
    assert "next: whole 0-8:" in shown


async def test_to_ask_for_a_route_counts_no_session(command, mesh):
    first = [(await mesh.client.select_route("models/acme/tiny")).hops[0].node for _ in range(2)]
    for _ in range(5):
        await command("route", "acme/tiny")
    again = [(await mesh.client.select_route("models/acme/tiny")).hops[0].node for _ in range(2)]
    assert sorted(first) == sorted(again)


async def test_a_cordon_reaches_the_node_with_its_heartbeat(command, mesh):
    assert (await mesh.beat("left")).desired_state == pb.NODE_STATE_READY
    assert "ready, cordoned" in (await command("nodes", "cordon", "left")).stdout
    assert (await mesh.beat("left")).desired_state == pb.NODE_STATE_CORDONED
    async with mesh.http.get(f"http://{mesh.addresses.http}/metrics") as response:
        assert "meshnet_control_nodes_cordoned 1.0" in await response.text()
    await command("nodes", "drain", "left", "--reason", "new disk")
    assert (await mesh.beat("left", active_sessions=1)).desired_state == pb.NODE_STATE_DRAINING
    assert "new disk" in (await command("nodes", "get", "left")).stdout


async def test_labels_are_set_and_removed_one_by_one(command, mesh):
    await command("nodes", "label", "left", "rack=7", "owner=ann=b")
    shown = await command("nodes", "label", "left", "rack-", "tier=")
    assert shown.stdout.strip() == "node left: owner=ann=b tier="
    assert dict((await mesh.client.get_node("left")).labels) == {"owner": "ann=b", "tier": ""}
    for bad in ("rack", "=7", "-"):
        result = await command("nodes", "label", "left", bad, fails=True)
        assert isinstance(result.exception, ConfigError)


async def test_only_a_node_that_left_is_removed(command, mesh):
    result = await command("nodes", "remove", "left", fails=True)
    assert isinstance(result.exception, MeshError)
    assert "drain it first" in str(result.exception)
    await command("nodes", "drain", "left")
    await mesh.client.heartbeat(
        "left",
        lease_id=mesh.leases["left"],
        incarnation=1,
        ready=True,
        load=types_pb2.LoadStats(),
    )
    await command("nodes", "remove", "left")
    await command("nodes", "remove", "right", "--force")
    assert [node.name for node in await mesh.client.list_nodes()] == ["nodes/whole"]


async def test_a_watch_prints_each_change_as_a_line(command, mesh, capsys):
    follower = Follower("", 0, load=False, as_json=True)
    watching = asyncio.create_task(follower.run(mesh.client))

    async def seen(wanted: str) -> None:
        lines = ""
        while wanted not in lines:
            await asyncio.sleep(0.01)
            lines += capsys.readouterr().out

    await asyncio.wait_for(seen('"nodes/whole"'), 10)
    await mesh.client.drain("left")
    await asyncio.wait_for(seen("NODE_STATE_DRAINING"), 10)
    watching.cancel()
    await asyncio.wait({watching})


async def test_a_watch_outlives_a_restart_and_says_when_changes_were_missed(capsys):
    printed = {"out": "", "err": ""}

    async def seen(stream: str, wanted: str) -> None:
        while wanted not in printed[stream]:
            await asyncio.sleep(0.01)
            now = capsys.readouterr()
            printed["out"] += now.out
            printed["err"] += now.err

    first = ControlServer(ControlSettings(http_port=0, grpc_port=0, close_grace_s=0.1))
    port = int((await first.start()).grpc.rpartition(":")[2])
    async with ControlClient(f"grpc://127.0.0.1:{port}") as client:
        watching = asyncio.create_task(Follower("", 0, load=False, as_json=True).run(client))
        await client.register("before", NODE)
        await asyncio.wait_for(seen("out", '"nodes/before"'), 10)
        await first.close()
        second = ControlServer(ControlSettings(http_port=0, grpc_port=port, close_grace_s=0.1))
        await second.start()
        await client.register("after", NODE)
        await asyncio.wait_for(seen("out", '"nodes/after"'), 20)
        await asyncio.wait_for(seen("err", "listing all nodes"), 10)
        watching.cancel()
        await asyncio.wait({watching})
    await second.close()


async def test_ids_and_names_complete_from_the_control_plane(mesh, command):
    def complete(*words: str, typed: str) -> list[str]:
        group = get_command(app)
        names = words[:-1] if words[0] == "nodes" else words
        found = group.commands[words[0]]
        if words[0] == "nodes":
            found = found.commands[words[1]]
        context = typer.Context(found, info_name=" ".join(names))
        context.params = {"control": f"grpc://{mesh.addresses.grpc}"}
        parameter = next(p for p in found.params if p.param_type_name == "argument")
        return [item.value for item in parameter.shell_complete(context, typed)]

    assert await asyncio.to_thread(complete, "nodes", "get", typed="") == ["left", "right", "whole"]
    assert await asyncio.to_thread(complete, "nodes", "drain", typed="r") == ["right"]
    assert await asyncio.to_thread(complete, "route", typed="ac") == ["acme/tiny"]


@pytest.mark.parametrize(
    ("replicas", "uncovered", "bar"),
    [
        ([1, 1, 2, 3], [], "▄▄██"),
        ([0, 1, 1, 1], [(0, 1)], "·▄▄▄"),
        ([1, 1, 1, 1], [(3, 4)], "▄▄▄·"),
        ([2] * 79 + [1], [], "█" * 39 + "▄"),
        ([2] * 3 + [0] + [2] * 116, [(3, 4)], "█·" + "█" * 38),
        ([], [], ""),
    ],
)
def test_a_bar_shows_the_worst_of_each_cells_layers(replicas, uncovered, bar):
    model = route_service_pb2.Model(
        ready_replicas=replicas,
        uncovered=[types_pb2.LayerRange(start=start, end=end) for start, end in uncovered],
    )
    assert coverage_bar(model) == bar
