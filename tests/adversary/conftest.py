"""One secured mesh of processes, which all attacks are made on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from meshnet.control.api_keys import create_api_key
from meshnet.control.client import ControlClient
from meshnet.control.store_url import make_documents
from meshnet.credentials import Credentials
from meshnet.join import JoinText
from meshnet.tls import files_in
from meshnet.v1 import enrollment_service_pb2 as pb
from tests.adversary.mesh import LAYERS, Mesh, ReplicaKey
from tests.control.secured import PATIENCE
from tests.e2e.commands import running
from tests.gateway.fakes import write_model

STUB = ("--backend", "stub", "--stub-layers", "2", "--listen", "127.0.0.1:0")


@pytest.fixture(scope="package")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A control plane with a state directory; two nodes and a gateway that joined by tokens."""
    folder = tmp_path_factory.mktemp("adversary")
    state, store = folder / "state", f"sqlite:{folder}/keys.db"
    env = {"MESHNET_STATE_DIR": str(folder / "user")}
    model = _model(folder / "stub")
    faces = ("--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--state", str(state))
    faces += ("--no-require-probe",)  # stub nodes have no numbers to compare
    with ExitStack() as stack:
        control = stack.enter_context(running("control", *faces))
        urls = control.event("listening")
        for_nodes, for_gateway, key = asyncio.run(_invite(urls["grpc"], state, store))
        replica_key = ReplicaKey()
        asyncio.run(_publish(replica_key, state))
        processes = {"control": control}
        for name, (first, end) in LAYERS.items():
            flags = ("--id", name, "--layers", f"{first}:{end}", *STUB)
            node = running("node", *flags, MESHNET_JOIN=for_nodes, **env)
            processes[name] = stack.enter_context(node)
        flags = ("--model", str(model), "--listen", "127.0.0.1:0", "--api-keys", store)
        front = running("gateway", "--name", "front", *flags, MESHNET_JOIN=for_gateway, **env)
        processes["front"] = stack.enter_context(front)
        yield Mesh(
            folder=folder,
            http=urls["http"].removeprefix("https://"),
            grpc=urls["grpc"],
            nodes={name: processes[name].event("ready")["address"] for name in LAYERS},
            gateway=processes["front"].event("listening")["http"],
            key=key,
            node_token=for_nodes,
            replica_key=replica_key,
            errors={name: process.errors for name, process in processes.items()},
        )


async def _invite(url: str, state: Path, store: str) -> tuple[str, str, str]:
    """Make a join token for nodes, one for the gateway, and an API key, as commands do."""
    texts = []
    async with ControlClient(url, PATIENCE, Credentials(files_in(state / "admin"))) as client:
        for role in (pb.ROLE_NODE, pb.ROLE_GATEWAY):
            made = await client.create_join_token(pb.JoinToken(role=role, max_uses=9))
            public, _, secret = made.token.partition(".")
            text = JoinText(public, secret, made.ca_spki_sha256, tuple(made.http_addresses)).text()
            texts.append(text)
    documents = make_documents(store)
    await documents.open()
    _, key = await create_api_key(documents, "app", now_s=time.time())
    await documents.close()
    return texts[0], texts[1], key


async def _publish(key: ReplicaKey, state: Path) -> None:
    documents = make_documents(f"sqlite:{state / 'documents.sqlite'}")
    await documents.open()
    await key.publish(documents)
    await documents.close()


def _model(folder: Path) -> Path:
    model = write_model(folder)
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    config |= {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    return model
