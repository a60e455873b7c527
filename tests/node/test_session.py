"""The session table: positions, order, budget, release."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from meshnet.errors import CacheFullError, Code, MeshError, PositionError, UnknownSessionError
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet.topology import LayerRange, SessionId
from meshnet.wire import ChunkHeader
from meshnet_node.budget import SessionLimits
from meshnet_node.session_table import SessionTable
from meshnet_node.stub import StubBackend
from tests.fakes import FakeClock

BACKEND = StubBackend(LayerRange(0, 1), hidden_size=8)


def new_session() -> SessionId:
    return SessionId(str(uuid.uuid4()))


def chunk(session: SessionId, position: int | None, tokens: int = 4, **fields) -> ChunkHeader:
    return ChunkHeader((1, tokens, 8), "bfloat16", session, position=position, **fields)


def table(clock: FakeClock | None = None, **limits) -> SessionTable:
    limits.setdefault("reorder_wait_s", 0.05)
    return SessionTable(BACKEND.open_cache, SessionLimits(**limits), clock or FakeClock())


def take_now(sessions: SessionTable, header: ChunkHeader) -> int:
    """Take a chunk's turn and append it, as a stage does."""
    with sessions.turn(header, Caller()) as (session, position):
        session.cache.truncate(position)
        session.cache.length += header.num_tokens
        return position


async def take(sessions: SessionTable, header: ChunkHeader) -> int:
    """The same on a thread of its own."""
    return await asyncio.to_thread(take_now, sessions, header)


async def until_waiting(sessions: SessionTable, session: SessionId) -> None:
    async with asyncio.timeout(5.0):
        while not sessions._sessions[session].changed._waiters:
            await asyncio.sleep(0.001)


async def test_chunks_append_and_an_absent_position_appends():
    sessions, session = table(), new_session()
    assert await take(sessions, chunk(session, 0)) == 0
    assert await take(sessions, chunk(session, 4)) == 4
    assert await take(sessions, chunk(session, None)) == 8
    assert len(sessions) == 1


async def test_a_lower_position_is_handed_on_for_truncation():
    sessions, session = table(), new_session()
    for position in (0, 4, 8):
        await take(sessions, chunk(session, position))
    assert await take(sessions, chunk(session, 4)) == 4
    assert await take(sessions, chunk(session, 8)) == 8


async def test_a_gap_is_refused_with_the_expected_position():
    sessions, session = table(), new_session()
    await take(sessions, chunk(session, 0))
    with pytest.raises(PositionError) as caught:
        await take(sessions, chunk(session, 9))
    assert caught.value.expected == 4
    assert await take(sessions, chunk(session, 4)) == 4


async def test_a_later_position_of_an_unknown_session_is_refused_at_once():
    sessions = table(reorder_wait_s=60.0)
    with pytest.raises(UnknownSessionError):
        await asyncio.wait_for(take(sessions, chunk(new_session(), 4)), 1.0)
    assert len(sessions) == 0


async def test_an_early_chunk_waits_for_the_one_before_it():
    sessions, session = table(reorder_wait_s=30.0), new_session()
    order: list[int] = []

    def send(index: int) -> None:
        header = chunk(session, index * 4, chunk_index=index, chunk_total=3)
        with sessions.turn(header, Caller()) as (held, position):
            order.append(index)
            held.cache.length = position + 4

    early = [asyncio.create_task(asyncio.to_thread(send, index)) for index in (2, 1)]
    await asyncio.sleep(0)
    await asyncio.to_thread(send, 0)
    await asyncio.wait_for(asyncio.gather(*early), 5.0)
    assert order == [0, 1, 2]


async def test_an_early_chunk_whose_first_never_comes_is_refused():
    sessions = table(reorder_wait_s=0.02)
    with pytest.raises(UnknownSessionError):
        await take(sessions, chunk(new_session(), 4, chunk_index=1, chunk_total=2))


async def test_one_chunk_of_a_session_computes_at_a_time():
    sessions, session = table(), new_session()
    await take(sessions, chunk(session, 0))
    running = 0
    most = 0

    def send() -> None:
        nonlocal running, most
        with sessions.turn(chunk(session, 4), Caller()) as (held, position):
            running += 1
            most = max(most, running)
            time.sleep(0.001)  # lets the others run
            held.cache.length = position + 4
            running -= 1

    await asyncio.gather(*(asyncio.to_thread(send) for _ in range(5)))
    assert most == 1


async def test_max_tokens_are_reserved_before_the_first_chunk_or_refused():
    sessions = table(cache_tokens=100)
    held, other = new_session(), new_session()
    await take(sessions, chunk(held, 0, max_tokens=90))
    assert sessions.reserved_tokens == 90
    with pytest.raises(CacheFullError) as caught:
        await take(sessions, chunk(other, 0, max_tokens=11))
    assert caught.value.retry_after_s
    assert len(sessions) == 1
    sessions.release(held)
    assert sessions.reserved_tokens == 0
    assert await take(sessions, chunk(other, 0, max_tokens=100)) == 0


async def test_use_past_the_reservation_is_counted():
    sessions, session = table(cache_tokens=10), new_session()
    await take(sessions, chunk(session, 0, max_tokens=6))
    await take(sessions, chunk(session, 4))
    assert sessions.reserved_tokens == 8
    with pytest.raises(CacheFullError):
        await take(sessions, chunk(session, 8))
    assert sessions.reserved_tokens == 8


async def test_session_places_are_bounded():
    sessions = table(max_sessions=1)
    await take(sessions, chunk(new_session(), 0))
    with pytest.raises(CacheFullError):
        await take(sessions, chunk(new_session(), 0))


async def test_draining_refuses_new_sessions_and_serves_held_ones():
    sessions, session = table(), new_session()
    await take(sessions, chunk(session, 0))
    sessions.draining = True
    assert await take(sessions, chunk(session, 4)) == 4
    with pytest.raises(MeshError) as caught:
        await take(sessions, chunk(new_session(), 0))
    assert caught.value.code.http_status == 503
    assert caught.value.reason == "DRAINING"


async def test_idle_sessions_are_listed_after_their_time():
    clock = FakeClock()
    sessions, session = table(clock, idle_ttl_s=60.0), new_session()
    await take(sessions, chunk(session, 0))
    clock.advance(59.0)
    assert sessions.idle() == []
    clock.advance(2.0)
    assert sessions.idle() == [session]


async def test_a_release_ends_chunks_that_wait():
    sessions, session = table(reorder_wait_s=30.0), new_session()
    await take(sessions, chunk(session, 0))
    waiting = asyncio.create_task(take(sessions, chunk(session, 8)))
    await until_waiting(sessions, session)
    sessions.release(session)
    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(waiting, 1.0)
    assert caught.value.reason == "SESSION_RELEASED"


async def test_a_chunk_whose_caller_leaves_waits_no_longer():
    sessions, session, caller = table(reorder_wait_s=30.0), new_session(), Caller()
    await take(sessions, chunk(session, 0))

    def wait() -> None:
        with sessions.turn(chunk(session, 8), caller):
            pass

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await until_waiting(sessions, session)
    caller.leave()
    with pytest.raises(CallerGoneError):
        await asyncio.wait_for(waiting, 5.0)
    assert await take(sessions, chunk(session, 4)) == 4


async def test_a_first_chunk_that_fails_leaves_no_session():
    sessions, session = table(), new_session()
    for failure in (MeshError(Code.INVALID_ARGUMENT, "no such token"), CallerGoneError()):
        with (
            pytest.raises(type(failure)),
            sessions.turn(chunk(session, 0, max_tokens=90), Caller()),
        ):
            raise failure
        assert (len(sessions), sessions.reserved_tokens) == (0, 0)
    assert await take(sessions, chunk(session, 0)) == 0


async def test_a_later_chunk_that_fails_gives_back_what_it_reserved():
    sessions, session = table(), new_session()
    await take(sessions, chunk(session, 0, max_tokens=6))
    turn = sessions.turn(chunk(session, 4, 50), Caller())
    assert sessions.reserved_tokens == 54
    with pytest.raises(ZeroDivisionError), turn:
        raise ZeroDivisionError
    assert (len(sessions), sessions.reserved_tokens) == (1, 6)


async def test_a_chunk_that_fails_leaves_a_reservation_as_it_was():
    sessions, session = table(), new_session()
    sessions.reserve(session, 40)
    with pytest.raises(ZeroDivisionError), sessions.turn(chunk(session, 0), Caller()):
        raise ZeroDivisionError
    assert (len(sessions), sessions.reserved_tokens) == (1, 40)


async def test_a_chunk_that_waits_for_one_that_fails_to_open_the_session_is_told():
    sessions, session = table(reorder_wait_s=30.0), new_session()
    turn = sessions.turn(chunk(session, 0, chunk_total=2), Caller())
    early = chunk(session, 4, chunk_index=1, chunk_total=2)
    waiting = asyncio.create_task(take(sessions, early))
    await until_waiting(sessions, session)
    with pytest.raises(ZeroDivisionError), turn:
        raise ZeroDivisionError
    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(waiting, 5.0)
    assert caught.value.reason == "SESSION_RELEASED"


async def test_what_is_sent_again_on_a_new_route_waits_for_the_first_of_it():
    """All of it lies within the cache, and the last to be computed must not be the first."""
    sessions, session = table(reorder_wait_s=30.0), new_session()
    for position in (0, 4, 8):
        await take(sessions, chunk(session, position))
    later = asyncio.create_task(
        take(sessions, chunk(session, 8, epoch=1, chunk_index=1, chunk_total=2))
    )
    await until_waiting(sessions, session)
    assert await take(sessions, chunk(session, 4, epoch=1, chunk_total=2)) == 4
    assert await asyncio.wait_for(later, 5.0) == 8
    assert await take(sessions, chunk(session, None, epoch=1)) == 12


async def test_a_later_chunk_of_a_new_route_whose_first_never_comes_is_refused():
    sessions, session = table(), new_session()
    for position in (0, 4):
        await take(sessions, chunk(session, position))
    with pytest.raises(PositionError, match="without its chunk 0"):
        await take(sessions, chunk(session, 4, epoch=1, chunk_index=1, chunk_total=2))
    assert await take(sessions, chunk(session, None)) == 8


async def test_a_chunk_of_an_older_epoch_is_refused_and_changes_nothing():
    sessions, session = table(), new_session()
    await take(sessions, chunk(session, 0))
    await take(sessions, chunk(session, 4, epoch=2))
    for position in (0, 4, 8, None):
        with pytest.raises(MeshError) as caught:
            await take(sessions, chunk(session, position, epoch=1))
        assert caught.value.reason == "EPOCH_STALE"
        assert "expected at least 2" in caught.value.message
    assert await take(sessions, chunk(session, None, epoch=2)) == 8
    assert await take(sessions, chunk(session, 4, epoch=5)) == 4


async def test_holding_a_session_waits_for_its_chunk_and_keeps_others_out():
    sessions, session = table(), new_session()
    await take(sessions, chunk(session, 0))
    turn = sessions.turn(chunk(session, 4), Caller())
    held, _ = turn.__enter__()
    holding = asyncio.create_task(asyncio.to_thread(sessions.hold, session, Caller()))
    await until_waiting(sessions, session)
    held.cache.length = 8
    turn.__exit__(None, None, None)
    hold = await asyncio.wait_for(holding, 5.0)
    assert hold.__enter__() == (held, 8)
    late = asyncio.create_task(take(sessions, chunk(session, 8)))
    await until_waiting(sessions, session)
    hold.__exit__(None, None, None)
    assert await asyncio.wait_for(late, 5.0) == 8


async def test_holding_ends_with_the_session_or_its_caller():
    sessions, session = table(), new_session()
    with pytest.raises(UnknownSessionError):
        sessions.hold(session, Caller())
    await take(sessions, chunk(session, 0))
    with sessions.turn(chunk(session, 4), Caller()):
        caller = Caller()
        leaving = asyncio.create_task(asyncio.to_thread(sessions.hold, session, caller))
        released = asyncio.create_task(asyncio.to_thread(sessions.hold, session, Caller()))
        await until_waiting(sessions, session)
        caller.leave()
        with pytest.raises(CallerGoneError):
            await asyncio.wait_for(leaving, 5.0)
        await until_waiting(sessions, session)
        sessions.release(session)
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(released, 5.0)
    assert caught.value.reason == "SESSION_RELEASED"
