"""A hostile node of the mesh, `alpha`, with the very certificate that it joined by."""

from __future__ import annotations

import pytest

from tests.adversary.calls import CALLS, GRPC_CODES
from tests.adversary.mesh import FACES, Mesh, Said

OTHERS = "NOT_OWN_NAME"
ROLE = "ROLE_NOT_ALLOWED"
REASONS = {
    "register": OTHERS,
    "heartbeat": OTHERS,
    "drain": OTHERS,
    "deregister": OTHERS,
    "renew": "MEMBER_REMOVED",  # by another key than the one that joined
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("what", CALLS)
async def test_a_node_acts_for_no_other_and_as_no_other(mesh: Mesh, what: str, face: str) -> None:
    status = GRPC_CODES[403] if face == "grpc" else 403
    async with mesh.unharmed():
        said = await CALLS[what].on(face, mesh, mesh.joined("alpha"))
        assert said == Said(status, REASONS.get(what, ROLE))
