"""The activation plane's client: chunks to other nodes over kept connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy.typing as npt

from meshnet.chunk import Answer
from meshnet.codec import ENCODINGS
from meshnet.compression import CompressionPolicies
from meshnet.dtypes import Body
from meshnet.errors import Code, MeshError, NextHopError, WireError
from meshnet.grammar import Phase
from meshnet.plane.bodies import (
    compress_tensor,
    decompress_body,
    read_body,
    read_bounded,
)
from meshnet.plane.connection import Connection, ConnectionEndedError
from meshnet.plane.http1 import AnswerHead, build_request, parse_answer
from meshnet.plane.memo import SERVER_TIMING, HeadMemo
from meshnet.plane.pool import ConnectionPool
from meshnet.problem import unpack_problem
from meshnet.topology import NodeId, SessionId
from meshnet.wire import (
    DEFAULT_LIMITS,
    AnswerHeader,
    ChunkHeader,
    WireLimits,
    pack_chunk,
    unpack_answer,
    view_tensor,
)

__all__ = ["PlaneClient"]

_MAX_HEADER_BYTES: Final = 32 * 1024
_MAX_HEADER_COUNT: Final = 128
_MAX_PROBLEM_BYTES: Final = 64 * 1024
_MAX_COLD_BYTES: Final = 16 * 1024 * 1024
_MAX_INTERIM: Final = 8
_SEND_ASIDE_BYTES: Final = 64 * 1024
"""A longer body is sent while an early answer is listened for."""

_T = TypeVar("_T")
_Read = Callable[[Connection, "_Received"], Awaitable[_T]]


@dataclass(frozen=True, slots=True)
class _Received:
    """A final answer's head: its bytes, what HTTP says, and what the wire says if known."""

    raw: bytes
    head: AnswerHead
    header: AnswerHeader | None


class PlaneClient:
    """Sends chunks to nodes and reads their answers.

    Args:
        policies: decide which bodies are compressed.
        route_condition: the policies' name for the links that lead to the nodes.
        limits: on answers, checked before anything is allocated for them.
        connect_timeout_s: for one attempt to connect.
        max_connections: to one address at a time; a further request waits its turn.
        max_idle_connections: to one address, kept for the next request.

    Raises:
        ValueError: the policies know no such `route_condition`.
    """

    def __init__(
        self,
        *,
        policies: CompressionPolicies,
        route_condition: str = "lan",
        limits: WireLimits = DEFAULT_LIMITS,
        connect_timeout_s: float = 5.0,
        max_connections: int = 256,
        max_idle_connections: int = 32,
    ) -> None:
        for phase in Phase:
            policies.for_condition(route_condition, phase.value)
        self._policies = policies
        self._route_condition = route_condition
        self._limits = limits
        self._answers: HeadMemo[tuple[AnswerHead, AnswerHeader]] = HeadMemo(SERVER_TIMING)
        self._pool = ConnectionPool(
            connect_timeout_s=connect_timeout_s,
            max_open=max_connections,
            max_idle=max_idle_connections,
        )

    async def forward(
        self,
        address: str,
        node: NodeId,
        header: ChunkHeader,
        tensor: npt.NDArray[Any],
        *,
        timeout_s: float,
    ) -> Answer:
        """Send one chunk and give its answer, whose tensor is the caller's to keep.

        A request that fails on a kept connection before any byte of an answer is sent once
        more on a new one, if its header states a position: that makes it harmless, where a
        chunk that is appended could be appended twice.

        Args:
            address: ``host:port`` of the node's plane.
            node: named in errors.
            header: its encoding is set here, by policy.
            tensor: of the header's shape and dtype; must not change until this returns.
            timeout_s: for everything, connecting included.

        Raises:
            NextHopError: the node could not be reached, did not answer in time, or
                answered what is no answer.
            MeshError: what the node, or one after it, answered instead.
        """
        policy = self._policies.for_condition(self._route_condition, header.phase.value)

        async def read(connection: Connection, received: _Received) -> Answer | MeshError:
            return await self._read_answer(connection, received, header)

        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            body, encoding = await compress_tensor(tensor, policy, ENCODINGS)
            if encoding != header.encoding:
                header = replace(header, encoding=encoding)
            fields = pack_chunk(header)
            head = build_request("POST", "/forward", address, fields, len(body))
            repeatable = header.position is not None
            result = await self._exchange(address, head, body, read, deadline, repeatable)
        except TimeoutError as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise NextHopError(
                f"node {node} at {address}: {reason}", failed_node=node, timed_out=True
            ) from error
        except (OSError, WireError) as error:
            raise NextHopError(f"node {node} at {address}: {error}", failed_node=node) from error
        if isinstance(result, MeshError):
            raise result
        return result

    async def release(self, address: str, session: SessionId, *, timeout_s: float = 5.0) -> None:
        """Free what a session holds at a node and along its route.

        Raises:
            MeshError: UNAVAILABLE or DEADLINE_EXCEEDED, or what the node answered.
        """
        status, head, body = await self._cold(
            address, "DELETE", f"/sessions/{session}", _MAX_PROBLEM_BYTES, timeout_s
        )
        if status >= 300 and status != 404:
            raise unpack_problem(status, head.fields, body)

    async def get(self, address: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Get a cold resource, as ``/healthz``: its status and its body of at most 16 MiB.

        Raises:
            MeshError: UNAVAILABLE or DEADLINE_EXCEEDED.
        """
        status, _, body = await self._cold(address, "GET", path, _MAX_COLD_BYTES, timeout_s)
        return status, body

    async def close(self) -> None:
        """Close idle connections now, and those in use when their request ends."""
        self._pool.close()

    async def _cold(
        self, address: str, method: str, target: str, max_bytes: int, timeout_s: float
    ) -> tuple[int, AnswerHead, bytes]:
        async def read(connection: Connection, received: _Received) -> tuple[AnswerHead, bytes]:
            return received.head, await read_bounded(connection, received.head, max_bytes)

        request = build_request(method, target, address, (), None)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            head, body = await self._exchange(address, request, b"", read, deadline, True)
        except TimeoutError as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise MeshError(Code.DEADLINE_EXCEEDED, f"{address}: {reason}") from error
        except (OSError, WireError) as error:
            raise MeshError(Code.UNAVAILABLE, f"{address}: {error}") from error
        return head.status, head, body

    async def _exchange(
        self,
        address: str,
        head: bytes,
        body: Body,
        read: _Read[_T],
        deadline: float,
        repeatable: bool,
    ) -> _T:
        """Send one request and read its answer by `read`; any failure closes the connection."""
        connection, reused = await self._pool.acquire(address, deadline)
        received = connection.received
        try:
            return await self._exchange_on(address, connection, head, body, read)
        except TimeoutError:
            raise
        except OSError:
            if not (repeatable and reused) or connection.received != received:
                raise
        # The node closed the kept connection, perhaps as this request was under way.
        connection, _ = await self._pool.acquire(address, deadline, fresh=True)
        return await self._exchange_on(address, connection, head, body, read)

    async def _exchange_on(
        self, address: str, connection: Connection, head: bytes, body: Body, read: _Read[_T]
    ) -> _T:
        sending: asyncio.Task[None] | None = None
        reusable = False
        try:
            if len(body) > _SEND_ASIDE_BYTES:
                sending = asyncio.create_task(connection.send(head, body))
                sending.add_done_callback(_mark_retrieved)
            else:
                # A node that answers early and closes breaks the sending; its answer counts.
                with contextlib.suppress(OSError):
                    await connection.send(head, body)
            received = await self._read_head(connection)
            answer = received.head
            result = await read(connection, received)
            framed = answer.chunked or answer.content_length is not None or answer.status == 204
            sent = sending is None or sending.done()
            reusable = answer.keep_alive and framed and sent
            return result
        finally:
            if sending is not None:
                sending.cancel()
            self._pool.release(address, connection, reusable=reusable)

    async def _read_head(self, connection: Connection) -> _Received:
        """Read the head of the final answer, past the interim ones (1xx)."""
        for _ in range(_MAX_INTERIM):
            raw = await connection.read_head(_MAX_HEADER_BYTES)
            if raw is None:
                raise ConnectionEndedError("the connection was closed before an answer")
            found = self._answers.find(raw)
            if found is not None:
                (head, header), timing = found
                if timing is not None:
                    header = replace(header, server_timing=timing.decode("ascii"))
                return _Received(raw, head, header)
            head = parse_answer(raw, max_fields=_MAX_HEADER_COUNT)
            if head.status >= 200:
                return _Received(raw, head, None)
        raise WireError(f"more than {_MAX_INTERIM} interim answers")

    async def _read_answer(
        self, connection: Connection, received: _Received, asked: ChunkHeader
    ) -> Answer | MeshError:
        """Read what answers a chunk; a MeshError that the node answered is given, not raised."""
        head, header = received.head, received.header
        if head.status >= 400:
            body = await read_bounded(connection, head, _MAX_PROBLEM_BYTES)
            return unpack_problem(head.status, head.fields, body)
        if head.status not in (200, 204):
            raise WireError(f"status {head.status}; expected 200 or 204")
        if header is None:
            header = unpack_answer(head.fields, self._limits)
            self._answers.keep(received.raw, (replace(head, fields=[]), header))
        if (header.session, header.chunk_index) != (asked.session, asked.chunk_index):
            raise WireError(
                f"an answer to chunk {header.chunk_index} of session {header.session};"
                f" expected chunk {asked.chunk_index} of {asked.session}",
                field="X-Meshnet-Session",
            )
        if head.status == 204:
            return Answer(replace(header, shape=None, dtype=None), None)
        return await self._read_tensor(connection, head, header)

    async def _read_tensor(
        self, connection: Connection, head: AnswerHead, header: AnswerHeader
    ) -> Answer:
        if header.shape is None or header.dtype is None:
            raise WireError("X-Meshnet-Shape is missing", field="X-Meshnet-Shape")
        body = await read_body(
            connection,
            encoding=header.encoding,
            num_bytes=header.num_bytes,
            content_length=head.content_length,
            chunked=head.chunked,
        )
        raw, codec_s = await decompress_body(header.encoding, body, header.num_bytes)
        tensor = view_tensor(raw, header.shape, header.dtype)
        return Answer(header, tensor, wire_bytes=len(body), codec_s=codec_s)


def _mark_retrieved(sending: asyncio.Task[None]) -> None:
    """Look at a sending's failure, which the reading side reports."""
    if not sending.cancelled():
        sending.exception()
