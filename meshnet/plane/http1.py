"""HTTP/1.1 heads: bytes to requests and answers, and back (sans-IO).

Strict where leniency lets two readers of one connection disagree on where a message
ends: bare LF, folded lines, a space before the colon, repeated or contradictory
lengths are all refused. Source: RFC 9110, RFC 9112.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from meshnet.errors import Code, MeshError, WireError

__all__ = [
    "CONTINUE",
    "AnswerHead",
    "RequestHead",
    "build_answer",
    "build_request",
    "find_head_end",
    "parse_answer",
    "parse_request",
]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_NAME: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rf"({_NAME}) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_STATUS_LINE = re.compile(r"HTTP/1\.([0-9]) ([1-5][0-9]{2})(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
# Every match spans one line from its start to its CRLF, so that as many matches as
# lines means that each line is a field.
_FIELDS = re.compile(rf"^({_NAME}):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*)\r\n", re.MULTILINE)
_ABSOLUTE = re.compile(r"https?://[^/?#@]+", re.IGNORECASE)
_LENGTH = re.compile(r"[0-9]{1,19}")
_FRAMING_NAMES: Final = {"connection", "content-length", "expect", "host", "transfer-encoding"}
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body.

    Attributes:
        method: as sent; methods are case-sensitive.
        target: origin form, path and query; an absolute form is reduced to it.
        fields: names as sent and values without surrounding white space, in order.
        content_length: bytes of the body; None where no length is stated.
        chunked: the body comes in chunked transfer coding.
        keep_alive: the caller lets the connection serve another request.
        expects_continue: the caller waits for 100 before it sends the body.
    """

    method: str
    target: str
    fields: list[tuple[str, str]]
    content_length: int | None
    chunked: bool
    keep_alive: bool
    expects_continue: bool

    @property
    def has_body(self) -> bool:
        """Tell whether bytes of this request follow its head."""
        return self.chunked or bool(self.content_length)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """An answer without its body.

    Attributes:
        status: HTTP status.
        fields: as in `RequestHead`.
        content_length: bytes of the body; None where no length is stated.
        chunked: the body comes in chunked transfer coding. With neither, the body
            ends with the connection, unless the status allows none.
        keep_alive: the connection may carry another request.
    """

    status: int
    fields: list[tuple[str, str]]
    content_length: int | None
    chunked: bool
    keep_alive: bool


def find_head_end(buffer: bytearray, start: int, end: int) -> int:
    """Find where the head in ``buffer[start:end]`` ends, past its empty line; -1 if not yet.

    A head of bare LF lines is found too, so that it is refused at once instead of
    being waited for.
    """
    found = buffer.find(b"\n\r\n", start, end)
    if found >= 0:
        return found + 3
    found = buffer.find(b"\n\n", start, end)
    return found + 2 if found >= 0 else -1


def parse_request(head: bytes, *, max_fields: int) -> RequestHead:
    """Read a request's head, up to and with its empty line.

    Raises:
        WireError: 400 for what RFC 9112 forbids, 431 for more than `max_fields` fields,
            501 for a transfer coding other than chunked. The connection must then be
            closed, since the end of the request is not known.
    """
    line, fields = _split(head, max_fields)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise WireError(f"request line {_shown(line)}; expected METHOD TARGET HTTP/1.1")
    method, target, major, minor = match.groups()
    if major != "1":
        raise WireError(f"HTTP/{major}.{minor} is not spoken here; expected HTTP/1.1 or HTTP/1.0")
    framing = _Framing(fields)
    if framing.hosts != 1 and (minor != "0" or framing.hosts):
        raise WireError(f"Host is given {framing.hosts} times; expected once", field="Host")
    if minor == "0" and framing.chunked:
        raise _fault("Transfer-Encoding", "chunked", "none in HTTP/1.0")
    return RequestHead(
        method=method,
        target=_origin_form(target),
        fields=fields,
        content_length=framing.content_length,
        chunked=framing.chunked,
        keep_alive=framing.keep_alive(minor),
        expects_continue=framing.expects_continue and minor != "0",
    )


def parse_answer(head: bytes, *, max_fields: int) -> AnswerHead:
    """Read an answer's head, up to and with its empty line.

    Raises:
        WireError: as `parse_request`.
    """
    line, fields = _split(head, max_fields)
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise WireError(f"status line {_shown(line)}; expected HTTP/1.1 STATUS REASON")
    framing = _Framing(fields)
    return AnswerHead(
        status=int(match[2]),
        fields=fields,
        content_length=framing.content_length,
        chunked=framing.chunked,
        keep_alive=framing.keep_alive(match[1]),
    )


def build_request(
    method: str, target: str, host: str, fields: Iterable[tuple[str, str]], length: int | None
) -> bytes:
    """Write a request's head; `length` None states none (a request without a body).

    Raises:
        ValueError: a value would break the head: CR or LF, or not latin-1.
    """
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in fields]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return _build(lines)


def build_answer(
    status: int, fields: Iterable[tuple[str, str]], length: int | None, *, close: bool
) -> bytes:
    """Write an answer's head; `length` None states none (as 204 requires).

    Raises:
        ValueError: as `build_request`.
    """
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in fields]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    if close:
        lines.append("Connection: close")
    return _build(lines)


def _build(lines: list[str]) -> bytes:
    lines += ("", "")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a header field's value holds CR or LF")
    return text.encode("latin-1")


def _split(head: bytes, max_fields: int) -> tuple[str, list[tuple[str, str]]]:
    """Split a head into its first line and its fields."""
    text = head.decode("latin-1")
    line, separator, block = text.partition("\r\n")
    if not separator or "\n" in line or not block.endswith("\r\n"):
        raise WireError("a line of the head ends in a bare LF; expected CRLF")
    fields: list[tuple[str, str]] = _FIELDS.findall(block)
    if " \r\n" in block or "\t\r\n" in block:
        fields = [(name, value.rstrip(" \t")) for name, value in fields]
    num_lines = block.count("\n") - 1
    if num_lines > max_fields:
        raise WireError(
            f"the head has {num_lines} header fields; expected at most {max_fields}",
            code=Code.HEADERS_TOO_LARGE,
        )
    if len(fields) != num_lines:
        lines = block[:-2].split("\n")[:-1]
        bad = next((item for item in lines if _FIELDS.fullmatch(item + "\n") is None), "")
        raise WireError(
            f"header line {_shown(bad)}; expected NAME: VALUE on one line,"
            " without a space before the colon or control characters"
        )
    return line, fields


class _Framing:
    """What a head's fields say of its message's end and its connection's future."""

    __slots__ = ("chunked", "content_length", "expects_continue", "hosts", "options")

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self.content_length: int | None = None
        self.chunked = False
        self.expects_continue = False
        self.hosts = 0
        self.options: list[str] = []
        for name, value in fields:
            key = name.lower()
            if key not in _FRAMING_NAMES:
                continue
            match key:
                case "content-length":
                    self._take_length(value)
                case "transfer-encoding":
                    self._take_coding(value)
                case "connection":
                    self.options += [item.strip(" \t") for item in value.lower().split(",")]
                case "expect":
                    self.expects_continue = value.lower() == "100-continue"
                case _:
                    self.hosts += 1
        if self.chunked and self.content_length is not None:
            raise WireError(
                "Content-Length stands beside Transfer-Encoding; expected one of them",
                field="Content-Length",
            )

    def keep_alive(self, minor: str) -> bool:
        """Tell whether the connection outlives the message of HTTP/1.`minor`."""
        if "close" in self.options:
            return False
        return minor != "0" or "keep-alive" in self.options

    def _take_length(self, value: str) -> None:
        if self.content_length is not None:
            raise WireError("Content-Length is given more than once", field="Content-Length")
        if _LENGTH.fullmatch(value) is None:
            raise _fault("Content-Length", value, "1 to 19 digits, once")
        self.content_length = int(value)

    def _take_coding(self, value: str) -> None:
        if self.chunked:
            raise WireError("Transfer-Encoding is given more than once", field="Transfer-Encoding")
        codings = [item.strip(" \t") for item in value.lower().split(",")]
        if codings != ["chunked"]:
            known_end = codings[-1] == "chunked" and codings.count("chunked") == 1
            raise _fault(
                "Transfer-Encoding",
                value,
                "chunked",
                code=Code.UNIMPLEMENTED if known_end else Code.INVALID_ARGUMENT,
            )
        self.chunked = True


def _origin_form(target: str) -> str:
    """Reduce a request target to its path and query."""
    if target.startswith("/") and "#" not in target:
        return target
    match = _ABSOLUTE.match(target)
    if match is not None and "#" not in target:
        rest = target[match.end() :]
        return rest if rest.startswith("/") else f"/{rest}"
    if target == "*":
        return target
    raise WireError(f"request target {_shown(target)}; expected a path, as in /forward")


def _fault(
    name: str, value: str, expected: str, *, code: Code = Code.INVALID_ARGUMENT
) -> MeshError:
    return WireError(f"{name}: {_shown(value)}; expected {expected}", field=name, code=code)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
