"""Calls to the members of an etcd cluster: short deadlines, and the next member at once.

Source: etcd's api/etcdserverpb/rpc.proto for paths and messages; its metadata key
``hasleader`` makes a member that sees no leader refuse instead of waiting.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from meshnet.control.registry import away
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd

__all__ = ["CompactedError", "EtcdClient", "LeaseGoneError", "Member", "range_end"]

ATTEMPT_S: Final = 1.0
MIN_ATTEMPTS: Final = 3
CALL_S: Final = 2.0
"""No attempt begins later: the caller may have a replica to ask that is better off."""

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

_HAS_LEADER: Final = (("hasleader", "true"),)
_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
_TRY_ANOTHER: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)

R = TypeVar("R", bound=Message)


class LeaseGoneError(Exception):
    """A write names a lease that etcd does not hold (any more)."""


class CompactedError(Exception):
    """A watch asks for revisions that etcd has compacted away: list again."""


class Member:
    """One member of the cluster.

    Args:
        address: its ``host:port`` for clients.
        tls: for TLS; None for none.
    """

    def __init__(self, address: str, tls: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None

    async def call(self, path: str, request: Message, response_type: type[R]) -> R:
        """Call once, with a deadline of `ATTEMPT_S`.

        Raises:
            grpc.aio.AioRpcError: as the member answered.
        """
        method = self._open().unary_unary(
            path,
            request_serializer=_write,
            response_deserializer=response_type.FromString,
        )
        response: R = await method(request, timeout=ATTEMPT_S, metadata=_HAS_LEADER)
        return response

    async def keep_alive(self, lease: int) -> etcd.LeaseKeepAliveResponse:
        """Renew a lease, by a stream that lives for one answer; a TTL of 0 means it is gone.

        Raises:
            grpc.aio.AioRpcError: as the member answered.
        """
        call = self._stream(
            "/etcdserverpb.Lease/LeaseKeepAlive", etcd.LeaseKeepAliveResponse, ATTEMPT_S
        )
        try:
            await call.write(etcd.LeaseKeepAliveRequest(id=lease))
            response = await call.read()
            if not isinstance(response, etcd.LeaseKeepAliveResponse):  # ended without an answer
                raise _ended(await call.code(), await call.details())
            return response
        finally:
            call.cancel()

    async def watch(self, prefix: bytes, start: int) -> AsyncGenerator[etcd.WatchResponse, None]:
        """Give what happens under `prefix` from revision `start` on; the first has no events.

        Raises:
            CompactedError: revision `start` is compacted away.
            grpc.aio.AioRpcError: the member ended the watch, for example without a leader.
        """
        call = self._stream("/etcdserverpb.Watch/Watch", etcd.WatchResponse, None)
        create = etcd.WatchCreateRequest(
            key=prefix, range_end=range_end(prefix), start_revision=start
        )
        try:
            await call.write(etcd.WatchRequest(create_request=create))
            while True:
                response = await call.read()
                if not isinstance(response, etcd.WatchResponse):
                    raise _ended(await call.code(), await call.details())
                if response.compact_revision:
                    raise CompactedError
                if response.canceled:
                    raise _ended(grpc.StatusCode.UNAVAILABLE, response.cancel_reason)
                yield response
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = (
                grpc.aio.insecure_channel(self.address, options=_OPTIONS)
                if self._tls is None
                else grpc.aio.secure_channel(self.address, self._tls, options=_OPTIONS)
            )
        return self._channel

    def _stream(self, path: str, response_type: type[Message], timeout_s: float | None) -> Any:
        method = self._open().stream_stream(
            path, request_serializer=_write, response_deserializer=response_type.FromString
        )
        return method(timeout=timeout_s, metadata=_HAS_LEADER)


class EtcdClient:
    """Calls whichever member answers.

    Every call is safe to repeat or its repetition shows: transactions compare revisions.

    Args:
        addresses: ``host:port`` of members.
        tls: for TLS; None for none.
    """

    def __init__(
        self, addresses: Sequence[str], tls: grpc.ChannelCredentials | None = None
    ) -> None:
        self._members = [Member(address, tls) for address in addresses]
        self._current = 0

    @property
    def name(self) -> str:
        """Name the cluster for people."""
        return "etcd at " + ", ".join(member.address for member in self._members)

    @property
    def member(self) -> Member:
        """Give the member that calls begin with."""
        return self._members[self._current]

    def leave(self, member: Member) -> None:
        """Begin with the next member from now on, if `member` is the one begun with."""
        if member is self.member:
            self._current = (self._current + 1) % len(self._members)

    async def range(self, request: etcd.RangeRequest) -> etcd.RangeResponse:
        """Read, with what was committed before the call."""
        return await self._call("/etcdserverpb.KV/Range", request, etcd.RangeResponse)

    async def txn(self, request: etcd.TxnRequest) -> etcd.TxnResponse:
        """Compare, then write or read.

        Raises:
            LeaseGoneError: a put names a lease that is gone.
            MeshError: UNAVAILABLE; it may have been done nevertheless.
        """
        return await self._call("/etcdserverpb.KV/Txn", request, etcd.TxnResponse)

    async def grant(self, lease: int, ttl_s: int) -> int:
        """Make a lease, unless it is there already; gives the seconds granted, no less.

        Raises:
            MeshError: UNAVAILABLE.
        """
        request = etcd.LeaseGrantRequest(id=lease, ttl=ttl_s)
        path = "/etcdserverpb.Lease/LeaseGrant"
        try:
            response = await self._call(path, request, etcd.LeaseGrantResponse)
        except _AlreadyThereError:  # an attempt that got no answer had been done
            return max(ttl_s, await self.keep_alive(lease))
        return response.ttl

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease; gives its seconds to live, 0 if it is gone.

        Raises:
            MeshError: UNAVAILABLE.
        """
        problem = ""
        for member in self._attempts():
            try:
                return (await member.keep_alive(lease)).ttl
            except grpc.aio.AioRpcError as error:
                problem = self._left(member, error)
        raise away(self.name, problem)

    async def revoke(self, lease: int) -> None:
        """End a lease, with the keys under it; one that is gone is no error.

        Raises:
            MeshError: UNAVAILABLE.
        """
        request = etcd.LeaseRevokeRequest(id=lease)
        try:
            await self._call("/etcdserverpb.Lease/LeaseRevoke", request, etcd.LeaseRevokeResponse)
        except LeaseGoneError:
            return

    async def close(self) -> None:
        """Close all connections."""
        for member in self._members:
            await member.close()

    def _attempts(self) -> Iterator[Member]:
        """Give the members to try: each of them, then one of them again, while there is time."""
        begun_s = time.monotonic()
        first = self._current
        for turn in range(max(MIN_ATTEMPTS, len(self._members) + 1)):
            if time.monotonic() < begun_s + CALL_S:
                yield self._members[(first + turn) % len(self._members)]

    async def _call(self, path: str, request: Message, response_type: type[R]) -> R:
        problem = ""
        for member in self._attempts():
            try:
                return await member.call(path, request, response_type)
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                if "lease not found" in details:
                    raise LeaseGoneError from None
                if "lease already exists" in details:
                    raise _AlreadyThereError from None
                problem = self._left(member, error)
        raise away(self.name, problem)

    def _left(self, member: Member, error: grpc.aio.AioRpcError) -> str:
        """Turn away from a member that failed; gives what it said.

        Raises:
            MeshError: another member would say the same.
        """
        problem = f"{error.details() or error.code().name} ({member.address})"
        if error.code() not in _TRY_ANOTHER:
            raise away(self.name, problem)
        self.leave(member)
        return problem


class _AlreadyThereError(Exception):
    """A lease of that id exists."""


def range_end(prefix: bytes) -> bytes:
    """Give the first key after all those that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _write(message: Message) -> bytes:
    return message.SerializeToString()


def _ended(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, empty, empty, details=details or "the stream ended")
