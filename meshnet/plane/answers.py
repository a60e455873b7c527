"""Answers as a client reads them, whatever drives its sockets, and what failed of one (sans-IO)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from meshnet.adaptive import EncodingChooser
from meshnet.choosers import record_answer
from meshnet.chunk import Answer
from meshnet.compression import CompressionResult
from meshnet.dtypes import Body
from meshnet.errors import Code, MeshError, NextHopError, WireError
from meshnet.plane.bodies import decompress_body, read_body, read_bounded
from meshnet.plane.http1 import AnswerHead, parse_answer
from meshnet.plane.inbox import ConnectionEndedError, Inbox, Reading, read_head
from meshnet.plane.memo import SERVER_TIMING, HeadMemo, LastHead
from meshnet.plane.tls import explain
from meshnet.problem import unpack_problem
from meshnet.topology import NodeId
from meshnet.wire import (
    AnswerHeader,
    ChunkHeader,
    WireLimits,
    unpack_answer,
    view_tensor,
)

__all__ = [
    "MAX_COLD_BYTES",
    "AnswerReader",
    "ColdAnswer",
    "Received",
    "check_done",
    "check_released",
    "cold_failure",
    "hop_failure",
    "learn",
]

MAX_COLD_BYTES: Final = 16 * 1024 * 1024
_MAX_HEADER_BYTES: Final = 32 * 1024
_MAX_HEADER_COUNT: Final = 128
_MAX_PROBLEM_BYTES: Final = 64 * 1024
_MAX_INTERIM: Final = 8
_MAX_TIMING_BYTES: Final = 16 * 1024
_PRINTABLE: Final = bytes(range(0x20, 0x7F))


class Received(NamedTuple):
    """An answer to a chunk, its body not decoded yet.

    Attributes:
        header: what its header fields say.
        body: as it came; None where the answer has no tensor.
        error: what the node answered instead of an output.
        reusable: the connection may serve another request.
        head_bytes: length of the answer's head.
    """

    header: AnswerHeader | None
    body: memoryview | None
    error: MeshError | None
    reusable: bool
    head_bytes: int = 0

    @property
    def coded_bytes(self) -> int:
        """Bytes that decoding has to make; 0 for a raw body."""
        header = self.header
        return header.num_bytes if header is not None and header.encoding is not None else 0

    def decode(self, sent_bytes: int) -> Answer:
        """Decode the body; gives the answer, whose tensor is the caller's to keep.

        `sent_bytes` is the length of the request's body.

        Raises:
            WireError: the body does not decode to the tensor that its header states.
        """
        header, body = self.header, self.body
        if header is None:
            raise TypeError("an error was answered")
        if body is None or header.shape is None or header.dtype is None:
            return Answer(header._replace(shape=None, dtype=None), None, sent_bytes=sent_bytes)
        raw: Body = body
        codec_s = 0.0
        if header.encoding is not None:
            raw, codec_s = decompress_body(header.encoding, body, header.num_bytes, header.width)
        tensor = view_tensor(raw, header.shape, header.dtype)
        return Answer(header, tensor, len(body), codec_s, sent_bytes)


@dataclass(frozen=True, slots=True)
class ColdAnswer:
    """An answer to anything but a chunk.

    Attributes:
        head: its status and header fields.
        body: whole.
        reusable: the connection may serve another request.
    """

    head: AnswerHead
    body: bytes
    reusable: bool


class AnswerReader:
    """Reads answers; keeps what was made of heads that were read before.

    Args:
        limits: on tensors, checked before anything is allocated for them.
    """

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._known: HeadMemo[tuple[AnswerHead, AnswerHeader]] = HeadMemo(SERVER_TIMING)

    def take_again(self, inbox: Inbox, asked: ChunkHeader) -> Received | None:
        """Take an answer like the connection's last but for Server-Timing, if all of it is here.

        None, and nothing is taken, where it is not: then `read` reads it.
        """
        last: LastHead[AnswerHeader] | None = inbox.last
        if last is None:
            return None
        header = last.made
        if header.session != asked.session or header.chunk_index != asked.chunk_index:
            return None
        taken = inbox.take_again(last, _is_printable, _MAX_TIMING_BYTES)
        if taken is None:
            return None
        timing, body = taken
        return Received(header.timed(timing.decode("ascii")), body, None, True, last.length)

    def read(self, inbox: Inbox, asked: ChunkHeader) -> Reading[Received]:
        """Read what answers a chunk.

        Raises:
            WireError: it is no answer to this chunk.
            ConnectionEndedError: there is none.
        """
        raw, head, header = yield from self._read_head(inbox)
        if head.status >= 400:
            problem = yield from read_bounded(inbox, head, _MAX_PROBLEM_BYTES)
            error = unpack_problem(head.status, head.fields, problem)
            return Received(None, None, error, _reusable(head))
        if head.status not in (200, 204):
            raise WireError(f"status {head.status}; expected 200 or 204")
        if header is None:
            header = unpack_answer(head.fields, self._limits)
            self._known.keep(raw, (replace(head, fields=[]), header))
        if (header.session, header.chunk_index) != (asked.session, asked.chunk_index):
            raise WireError(
                f"an answer to chunk {header.chunk_index} of session {header.session};"
                f" expected chunk {asked.chunk_index} of {asked.session}",
                field="X-Meshnet-Session",
            )
        if head.status == 204:
            return Received(header, None, None, _reusable(head))
        if header.shape is None:
            raise WireError("X-Meshnet-Shape is missing", field="X-Meshnet-Shape")
        num_bytes = header.num_bytes
        body = yield from read_body(
            inbox,
            encoding=header.encoding,
            num_bytes=num_bytes,
            content_length=head.content_length,
            chunked=head.chunked,
        )
        reusable = _reusable(head)
        if header.encoding is None and reusable and head.content_length == num_bytes:
            inbox.last = LastHead(raw, SERVER_TIMING, header, num_bytes)
        return Received(header, body, None, reusable, len(raw))

    def read_cold(self, inbox: Inbox, max_bytes: int) -> Reading[ColdAnswer]:
        """Read an answer of at most `max_bytes`.

        Raises:
            WireError: it is longer, or no answer.
            ConnectionEndedError: there is none.
        """
        _, head, _ = yield from self._read_head(inbox)
        body = yield from read_bounded(inbox, head, max_bytes)
        return ColdAnswer(head, body, _reusable(head))

    def _read_head(self, inbox: Inbox) -> Reading[tuple[bytes, AnswerHead, AnswerHeader | None]]:
        """Read the head of the final answer, past the interim ones (1xx).

        Gives its bytes, what HTTP says, and what the wire says where one like it was read.
        """
        for _ in range(_MAX_INTERIM):
            raw = yield from read_head(inbox, _MAX_HEADER_BYTES)
            if raw is None:
                closed = ConnectionEndedError("the connection was closed before an answer")
                raise closed from inbox.failure
            found = self._known.find(raw)
            if found is not None:
                (head, header), timing = found
                if timing is not None:
                    header = header.timed(timing.decode("ascii"))
                return raw, head, header
            head = parse_answer(raw, max_fields=_MAX_HEADER_COUNT)
            if head.status >= 200:
                return raw, head, None
        raise WireError(f"more than {_MAX_INTERIM} interim answers")


def _is_printable(value: bytes) -> bool:
    """Tell whether a field's value is of printable ASCII, and no blank is at its ends."""
    return not value.translate(None, _PRINTABLE) and value.strip(b" ") == value


def learn(
    chooser: EncodingChooser, sent: CompressionResult, elapsed_s: float, received: Received
) -> None:
    """Learn what an answer tells of the link: its speed, and what the node reads.

    `elapsed_s` is from the first byte sent until the answer was read.
    """
    if received.header is not None:
        answer_bytes = 0 if received.body is None else len(received.body)
        record_answer(chooser, sent, elapsed_s, received.header, answer_bytes)
    elif (
        received.error is not None
        and received.error.field == "X-Meshnet-Encoding"
        and sent.encoding is not None
    ):
        chooser.forget_reads()


def check_done(answer: ColdAnswer) -> None:
    """Raise what a node answered instead of doing what it was asked."""
    if answer.head.status >= 300:
        raise unpack_problem(answer.head.status, answer.head.fields, answer.body)


def check_released(answer: ColdAnswer) -> None:
    """Raise what a node answered to a release, where that is an error; not held is none."""
    status = answer.head.status
    if status >= 300 and status != 404:
        raise unpack_problem(status, answer.head.fields, answer.body)


def hop_failure(error: Exception, address: str, node: NodeId, timeout_s: float) -> NextHopError:
    """Give what a socket or an answer failed by as an error that names the node."""
    at = f"node {node} at {address}"
    if isinstance(error, TimeoutError):
        return NextHopError(f"{at}: {_late(error, timeout_s)}", failed_node=node, timed_out=True)
    return NextHopError(f"{at}: {explain(error)}", failed_node=node)


def cold_failure(error: Exception, address: str, timeout_s: float) -> MeshError:
    """Give what a socket or an answer failed by as UNAVAILABLE or DEADLINE_EXCEEDED."""
    if isinstance(error, TimeoutError):
        return MeshError(Code.DEADLINE_EXCEEDED, f"{address}: {_late(error, timeout_s)}")
    return MeshError(Code.UNAVAILABLE, f"{address}: {explain(error)}")


def _late(error: TimeoutError, timeout_s: float) -> str:
    return str(error) or f"no answer within {timeout_s:g} s"


def _reusable(head: AnswerHead) -> bool:
    framed = head.chunked or head.content_length is not None or head.status == 204
    return head.keep_alive and framed
