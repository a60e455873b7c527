"""Keeps an index equal to what etcd holds: lists once, then watches, resuming where it was."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import grpc

from meshnet.control.etcd.client import CompactedError, EtcdClient, Member, range_end
from meshnet.control.etcd.index import Index
from meshnet.control.etcd.keys import PREFIX
from meshnet.control.registry import StoreHealth, away
from meshnet.errors import MeshError
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from meshnet.tasks import end_task

__all__ = ["Feed"]

PROBE_INTERVAL_S: Final = 0.5
CONTACT_S: Final = 2.5
"""Without an answer for this long, the index is no longer called current."""

CREATE_S: Final = 1.0
PAUSE_S: Final = 0.1

_log = logging.getLogger(__name__)


class Feed:
    """Feeds an index.

    The member that is watched is probed with linearizable reads: one that was stopped or
    cut off would keep the watch open and silent. What it committed before it answered a
    probe, it has sent to the watch before.
    """

    def __init__(self, client: EtcdClient, index: Index) -> None:
        self._client = client
        self._index = index
        self._contact_s = time.monotonic()
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout_s: float) -> None:
        """Fill the index and begin to follow.

        Raises:
            MeshError: UNAVAILABLE, etcd did not answer within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                await self._list()
                break
            except MeshError:
                if time.monotonic() >= deadline_s:
                    raise
                await asyncio.sleep(PAUSE_S)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop following."""
        await end_task(self._task)

    def health(self) -> StoreHealth:
        """Tell how old the index may be."""
        age_s = time.monotonic() - self._contact_s
        if age_s < CONTACT_S:
            return StoreHealth()
        return StoreHealth(is_connected=False, age_s=age_s, problem=self._problem)

    async def _list(self) -> None:
        begun_s = time.monotonic()
        response = await self._client.range(
            etcd.RangeRequest(key=PREFIX, range_end=range_end(PREFIX))
        )
        self._index.reset(response.kvs, response.header.revision)
        self._touch(begun_s)

    async def _run(self) -> None:
        must_list = False
        while True:
            member = self._client.member
            try:
                if must_list:
                    await self._list()
                    must_list = False
                await self._follow(member)
            except CompactedError:
                _log.warning("etcd has compacted revision %d: listing", self._index.applied + 1)
                must_list = True
            except (grpc.aio.AioRpcError, MeshError, TimeoutError) as error:
                self._note(member, error)
                self._client.leave(member)
                await asyncio.sleep(PAUSE_S)

    async def _follow(self, member: Member) -> None:
        """Watch `member` until that fails.

        Raises:
            CompactedError, AioRpcError, MeshError, TimeoutError: why it ended.
        """
        watch = member.watch(PREFIX, self._index.applied + 1)
        async with aclosing(watch):
            async with asyncio.timeout(CREATE_S):  # wait_for may swallow a cancellation
                created = await anext(watch)
            reading = asyncio.create_task(self._read(watch, created.header.revision))
            probing = asyncio.create_task(self._probe(member))
            try:
                done, _ = await asyncio.wait(
                    {reading, probing}, return_when=asyncio.FIRST_COMPLETED
                )
                done.pop().result()  # neither ends but by raising
            finally:
                for task in (reading, probing):
                    task.cancel()
                await asyncio.wait({reading, probing})

    async def _read(
        self, watch: AsyncGenerator[etcd.WatchResponse, None], connected_at: int
    ) -> None:
        async for response in watch:
            self._index.apply(response.events, news_after=connected_at)
        raise away(self._client.name, "the watch ended")

    async def _probe(self, member: Member) -> None:
        request = etcd.RangeRequest(key=PREFIX)
        while True:
            begun_s = time.monotonic()
            await member.call("/etcdserverpb.KV/Range", request, etcd.RangeResponse)
            self._touch(begun_s)
            await asyncio.sleep(PROBE_INTERVAL_S)

    def _touch(self, at_s: float) -> None:
        if self._problem:
            _log.warning("%s answers again", self._client.name)
            self._problem = ""
        self._contact_s = at_s

    def _note(self, member: Member, error: Exception) -> None:
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        problem = f"{details or type(error).__name__} ({member.address})"
        if not self._problem:
            _log.warning("%s: the watch failed: %s", self._client.name, problem)
        self._problem = problem
