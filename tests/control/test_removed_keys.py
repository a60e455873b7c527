"""Keys of removed members: known to all replicas, through times without a store."""

from __future__ import annotations

import asyncio

import pytest

from meshnet.control import removed_keys
from meshnet.control.documents import MemoryDocuments
from meshnet.control.removed_keys import RemovedKeys, removed_in
from meshnet.errors import Code, MeshError
from meshnet.v1 import types_pb2


class Away(MemoryDocuments):
    """A store that can be away."""

    is_away = False

    async def list(self, kind):
        if self.is_away:
            raise MeshError(Code.UNAVAILABLE, "the store is away")
        return await super().list(kind)


def is_refused(keys: RemovedKeys, key: str) -> bool:
    try:
        keys.check(key)
    except MeshError as error:
        return (error.code, error.reason) == (Code.UNAUTHENTICATED, "MEMBER_REMOVED")
    return False


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(removed_keys, "_READ_EVERY_S", 0.01)


async def until(check) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.01)


async def test_a_key_is_refused_at_once_here_and_soon_at_other_replicas(often):
    documents = MemoryDocuments()
    here, there = RemovedKeys(documents, lambda: 0.0), RemovedKeys(documents, lambda: 0.0)
    await there.start()
    await here.add("k1", 10.0)
    assert is_refused(here, "k1")
    assert not is_refused(here, "k2")
    await until(lambda: is_refused(there, "k1"))
    await there.close()


async def test_what_was_known_holds_while_the_store_is_away_and_more_comes_after(often):
    documents = Away()
    keys, other = RemovedKeys(documents, lambda: 0.0), RemovedKeys(documents, lambda: 0.0)
    await keys.start()
    await keys.add("k1", 10.0)
    documents.is_away = True
    await other.add("k2", 10.0)
    await asyncio.sleep(0.05)
    assert is_refused(keys, "k1")
    assert not is_refused(keys, "k2")
    documents.is_away = False
    await until(lambda: is_refused(keys, "k2"))
    await keys.close()


async def test_a_store_that_is_away_is_said_at_the_start():
    documents = Away()
    documents.is_away = True
    with pytest.raises(MeshError, match="away"):
        await RemovedKeys(documents).start()


async def test_keys_are_forgotten_when_their_last_certificate_has_ended():
    documents = MemoryDocuments()
    await RemovedKeys(documents, lambda: 0.0).add("k1", 10.0)
    later = RemovedKeys(documents, lambda: 10.0)
    await later.start()
    assert not is_refused(later, "k1")
    assert await documents.list("removed-keys") == []
    await later.close()


async def test_nodes_hear_of_living_keys_and_of_no_more_than_a_message_holds(monkeypatch):
    monkeypatch.setattr(removed_keys, "_MAX_PUBLISHED", 3)
    keys = RemovedKeys(MemoryDocuments(), lambda: 0.0)
    for number in range(5):
        await keys.add(f"{number:064x}", 10.5 + number)
    policy = types_pb2.GrantPolicy()
    keys.publish(policy)
    assert removed_in(policy) == {f"{number:064x}": 11 + number for number in (2, 3, 4)}
