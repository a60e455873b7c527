"""A gateway hears who was removed from the mesh, through times without a control plane."""

from __future__ import annotations

import asyncio

from meshnet.errors import Code, MeshError
from meshnet.removals import Removals
from meshnet.v1 import types_pb2
from meshnet_gateway import member_watch
from meshnet_gateway.member_watch import MemberWatch

KEY = "ab" * 32


class Control:
    """Is away at first, then says who was removed."""

    asked = 0

    async def get_grant_policy(self) -> types_pb2.GrantPolicy:
        self.asked += 1
        if self.asked < 3:
            raise MeshError(Code.UNAVAILABLE, "the control plane is away")
        policy = types_pb2.GrantPolicy()
        policy.time.FromSeconds(100)
        removed = policy.removed_keys.add(key_sha256=bytes.fromhex(KEY))
        removed.expire_time.FromSeconds(200)
        return policy


async def test_a_gateway_learns_of_removed_members_once_the_control_plane_is_there(monkeypatch):
    monkeypatch.setattr(member_watch, "_ASK_EVERY_S", 0.01)
    control, removals = Control(), Removals()
    watch = MemberWatch(control, removals)
    watch.start()
    async with asyncio.timeout(20):
        while control.asked < 5:
            await asyncio.sleep(0.01)
    await watch.close()
    assert KEY in removals
    assert removals.generation == 1
