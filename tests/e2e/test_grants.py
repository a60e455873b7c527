"""A mesh of processes whose nodes want grants: the same answers, whoever leaves on the way."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest

from tests.e2e.commands import eventually
from tests.e2e.sessions import LAYERS, figures, mesh


def forged(address: str, target: str) -> tuple[int, str]:
    """Ask a node, as anybody could, to send a session on to `target`; gives status and reason."""
    request = urllib.request.Request(
        f"http://{address}/sessions/8d7f2f0a-5c1e-4b7a-9a53-0d7c6f1e2b34",
        headers={
            "X-Meshnet-Max-Tokens": "5",
            "X-Meshnet-Layers": "0-10",
            "X-Meshnet-Route": f"target@{target}/10-20",
        },
        method="PUT",
    )
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request):
        pass
    with caught.value as answer:
        return answer.status, json.loads(answer.read())["reason"]


@pytest.mark.timeout(600)
def test_grants_change_no_token_when_a_node_is_lost_or_drains(smollm2):
    with mesh(smollm2, "--require-grants") as made:
        undisturbed = made.ask().choices[0].message.content
        with socket.create_server(("127.0.0.1", 0)) as listener:
            target = f"127.0.0.1:{listener.getsockname()[1]}"
            first = made.nodes["first"].ready["address"]
            assert forged(first, target) == (403, "GRANT_MISSING")
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
        spare = made.join_aside("spare", LAYERS["middle"])

        def lose() -> None:
            made.admit("spare")
            made.nodes["middle"].process.kill()

        assert made.stream_and(lose) == undisturbed
        # It starts again under its name: grants are for its new start.
        made.join("middle", LAYERS["middle"])
        assert made.stream_and(lambda: made.drain("spare")) == undisturbed
        eventually(lambda: figures(spare.ready["address"])["meshnet_sessions"] == 0)
        with urllib.request.urlopen(made.facts["http"] + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        assert 'meshnet_recoveries_total{way="journal"} 1.0' in lines
        assert not any("X-Meshnet-Grant" in line for line in made.gateway.errors)
        assert not any("Traceback" in line for line in made.gateway.errors)
