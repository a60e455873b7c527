"""Requests as a client writes them, whatever drives its sockets (sans-IO)."""

from __future__ import annotations

from typing import Final, NamedTuple

from meshnet.adaptive import EncodingChooser
from meshnet.cache_wire import CacheHeader, pack_cache
from meshnet.compression import CompressionResult
from meshnet.dtypes import Body
from meshnet.plane.bodies import compress_body
from meshnet.plane.http1 import build_request
from meshnet.plane.memo import POSITION
from meshnet.plans import Plan
from meshnet.topology import SessionId
from meshnet.wire import ChunkHeader, Headers, pack_chunk

__all__ = [
    "RequestMemo",
    "pack_cache_request",
    "pack_cold",
    "pack_request",
    "session_path",
]

_MAX_KNOWN: Final = 256


class _Repeated(NamedTuple):
    """A chunk's request as it was written, for others like it but for the position.

    Attributes:
        address: of the node.
        header: as given, with no encoding.
        num_bytes: of the raw body.
        chooser: of the link.
        plan: by which such a body goes raw, whatever the link does.
        before: the head before the position's value.
        after: the head after it.
    """

    address: str
    header: ChunkHeader
    num_bytes: int
    chooser: EncodingChooser
    plan: Plan
    before: bytes
    after: bytes


class RequestMemo:
    """Requests of sessions whose next is most often like the last: a step of decoding.

    May be used by several threads.
    """

    def __init__(self) -> None:
        self._known: dict[SessionId, _Repeated] = {}

    def repeat(
        self, address: str, header: ChunkHeader, raw: Body
    ) -> tuple[EncodingChooser, bytes, CompressionResult] | None:
        """Write a request that differs from the session's last in its position alone.

        Gives the link's chooser, the head, and the body as `pack_request` does; None where
        it is another request.
        """
        known = self._known.get(header.session)
        if (
            known is None
            or header.position is None
            or known.num_bytes != len(raw)
            or known.address != address
            or not known.header.repeats(header)
        ):
            return None
        head = b"%b%d%b" % (known.before, header.position, known.after)
        return known.chooser, head, known.chooser.pass_raw(known.plan, raw)

    def keep(
        self,
        address: str,
        header: ChunkHeader,
        head: bytes,
        num_bytes: int,
        plan: Plan,
        chooser: EncodingChooser,
    ) -> None:
        """Keep a request; only what goes raw by its size alone does so next time too."""
        match = POSITION.search(head)
        if match is None or not plan.stays_raw or header.encoding is not None:
            return
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        start, end = match.span(1)
        self._known[header.session] = _Repeated(
            address, header, num_bytes, chooser, plan, head[:start], head[end:]
        )


def pack_request(
    address: str, header: ChunkHeader, raw: Body, plan: Plan, chooser: EncodingChooser
) -> tuple[bytes, CompressionResult]:
    """Write a chunk's request: its head, and its tensor's bytes encoded as planned."""
    sent = compress_body(raw, plan, chooser)
    if sent.encoding != header.encoding:
        header = header._replace(encoding=sent.encoding)
    head = build_request("POST", "/forward", address, pack_chunk(header), sent.output_bytes)
    return head, sent


def pack_cold(address: str, method: str, target: str, fields: Headers = ()) -> bytes:
    """Write a request without a body, and say so where its method could have one."""
    length = 0 if method in ("PUT", "POST") else None
    return build_request(method, target, address, fields, length)


def pack_cache_request(address: str, header: CacheHeader) -> bytes:
    """Write the head of a request whose body is a session's cache."""
    path = f"{session_path(header.session)}/cache"
    return build_request("PUT", path, address, pack_cache(header), header.num_bytes)


def session_path(session: SessionId, action: str = "") -> str:
    """Give the path of a session, or of what is done with it."""
    return f"/sessions/{session}{action}"
