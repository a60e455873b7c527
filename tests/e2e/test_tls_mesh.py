"""A mesh over mutual TLS: stub nodes, control plane and gateway, and those who do not belong."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from meshnet.compression import CompressionPolicies
from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.credentials import Credentials
from meshnet.topology import LayerRange, NodeId
from meshnet_gateway.app import Gateway, GatewaySettings
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.recoveries import RecoverySettings
from meshnet_node.app import Node
from meshnet_node.heartbeat import Heartbeat, Registration
from meshnet_node.settings import NodeSettings
from meshnet_node.stub import StubBackend
from tests.e2e.commands import meshnet, meshnet_json, running
from tests.gateway.fakes import write_model
from tests.plane.certificates import Authority, make_authority
from tests.programs import program

POLICIES = CompressionPolicies()
STUB = ("node", "--backend", "stub", "--layers", "0:1", "--listen", "127.0.0.1:0", "--id", "alpha")


def flags_of(authority: Authority) -> tuple[str, ...]:
    return (
        *("--tls-cert", str(authority.certificate), "--tls-key", str(authority.key)),
        *("--tls-ca", str(authority.ca)),
    )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText.load(write_model(tmp_path_factory.mktemp("text")))


class Mesh:
    """A control plane, and what joins it."""

    def __init__(self, stack: AsyncExitStack, control: str, text: ModelText) -> None:
        self.control = control
        self._stack = stack
        self._text = text

    async def join(self, name: str, first: int, end: int, tls: Credentials | None) -> Node:
        backend = StubBackend(
            LayerRange(first, end), hidden_size=8, num_layers=2, head=True, vocab_size=300
        )
        settings = NodeSettings(NodeId(name), port=0, grace_s=1.0, tls=tls)
        node = Node(settings, lambda: backend, POLICIES)
        self._stack.push_async_callback(node.close)
        address = await node.listen()
        registration = Registration(NodeId(name), backend.spec, address, "", tls=tls)
        heartbeat = Heartbeat(self.control, registration, node)
        await heartbeat.start()
        self._stack.push_async_callback(heartbeat.close)
        await node.load()
        await heartbeat.beat()
        return node

    async def ask(self, tls: Credentials | None) -> tuple[int, dict[str, Any]]:
        """Ask for four tokens by a gateway with these files; gives status and JSON."""
        settings = GatewaySettings(
            port=0,
            control_url=self.control,
            tls=tls,
            recovery=RecoverySettings(spare_wait_s=0.2),
            grace_s=1.0,
        )
        gateway = Gateway(settings, {"stub": self._text}, POLICIES)
        try:
            address = await gateway.start()
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    f"http://{address}/v1/completions",
                    json={"model": "stub", "prompt": "hello", "max_tokens": 4},
                ) as answer,
            ):
                return answer.status, await answer.json()
        finally:
            await gateway.close()


@asynccontextmanager
async def control_plane(text: ModelText) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        server = ControlServer(ControlSettings(http_port=0, grpc_port=0))
        addresses = await server.start()
        stack.push_async_callback(server.close)
        yield Mesh(stack, f"grpc://{addresses.grpc}", text)


async def test_a_mesh_serves_over_mutual_tls_and_only_those_that_it_knows(
    authority: Authority, stranger: Authority, text: ModelText
) -> None:
    own = authority.client(own=True)
    async with control_plane(text) as mesh:
        first = await mesh.join("alpha", 0, 1, own)
        last = await mesh.join("beta", 1, 2, own)
        async with ControlClient(mesh.control) as control:
            nodes = await control.list_nodes()
        assert all(node.endpoints[0].uri.startswith("https://127.0.0.1:") for node in nodes)
        for tls, said in (
            (own, ""),
            (None, "start this gateway with --tls-ca"),
            (stranger.client(own=True), "its certificate is not accepted"),
            (authority.client(), "it refused this side's certificate"),
            (own, ""),
        ):
            status, answer = await mesh.ask(tls)
            if not said:
                assert status == 200, answer
                assert answer["usage"]["completion_tokens"] == 4
                continue
            message = answer["error"]["message"]
            assert status >= 500, answer
            assert "node alpha at 127.0.0.1:" in message
            assert said in message
        assert first.stage is not None
        assert last.stage is not None
        assert first.stage.num_chunks == last.stage.num_chunks == 8


async def test_a_plain_node_in_a_mesh_with_tls_is_named(
    authority: Authority, text: ModelText
) -> None:
    async with control_plane(text) as mesh:
        await mesh.join("alpha", 0, 1, authority.client(own=True))
        await mesh.join("beta", 1, 2, None)
        status, answer = await mesh.ask(authority.client(own=True))
        assert status == 503, answer
        message = answer["error"]["message"]
        assert "node beta at 127.0.0.1:" in message
        assert "start it with --tls-cert and --tls-key" in message


def test_certificates_made_as_the_readme_says_are_accepted(tmp_path: Path) -> None:
    program("openssl")
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    commands = readme.split("### TLS between gateway and nodes\n")[1].split("```sh\n")[1]
    subprocess.run(
        ["sh", "-e", "-c", commands.split("```")[0].replace("10.0.0.7", "127.0.0.1")],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    flags = flags_of(Authority(tmp_path / "ca.pem", tmp_path / "node.pem", tmp_path / "node.key"))
    with running(*STUB, *flags) as node:
        url = f"https://{node.event('ready')['address']}"
        rows = meshnet_json("bench", "hop", url, *flags, "--quick", "--rounds", "1")
        assert rows["node"]["node"] == "alpha"


def test_commands_take_the_files(tmp_path: Path, authority: Authority, stranger: Authority) -> None:
    with running(*STUB, *flags_of(authority)) as node:
        address = node.event("ready")["address"]
        url = f"https://{address}"
        rows = meshnet_json("bench", "hop", url, *flags_of(authority), "--quick", "--rounds", "1")
        assert rows["node"]["node"] == "alpha"
        for flags, at, said in (
            (flags_of(stranger), url, "its certificate is not accepted"),
            (("--tls-ca", str(authority.ca)), url, "refused this side's certificate"),
            ((), url, "its certificate is not accepted"),
            ((), f"http://{address}", "speaks TLS"),
            (flags_of(authority), f"http://{address}", "expected https://"),
        ):
            done = meshnet("bench", "hop", at, *flags, "--quick")
            assert done.returncode in (1, 2)
            assert said in done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
        asked = subprocess.run(
            [
                *(program("curl"), "-sS", "--noproxy", "*", "--cacert", str(authority.ca)),
                *("--cert", str(authority.certificate), "--key", str(authority.key)),
                f"{url}/healthz",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        assert '"ready"' in asked.stdout
        assert node.interrupt() == 0
        assert not any("Traceback" in line for line in node.errors)
    for flags, said in (
        (("--tls-cert", str(tmp_path / "no.pem")), "--tls-key is missing"),
        (("--tls-ca", str(authority.ca)), "--tls-cert is missing"),
        (
            (*flags_of(authority), "--tls-key", str(tmp_path / "no.key")),
            f"--tls-key: {tmp_path / 'no.key'}: No such file",
        ),
    ):
        done = meshnet(*STUB, *flags)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
