"""Path templates of google.api.http: parsing, matching, and which of several wins (pure).

Source: google/api/http.proto, "Path template syntax".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from meshnet.control.validate import invalid

__all__ = ["Capture", "PathTemplate", "parse_template", "percent_decode", "split_path"]

_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})?")
_LITERAL = re.compile(r"[A-Za-z0-9._~!$&'()+,;@-]+")
_SLASH = re.compile(r"/(?![^{}]*\})")  # not inside of a variable
_FIELD_PATH = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*")


class _Rank(IntEnum):
    """How particular one position of a template is; the lowest wins."""

    LITERAL = 0
    WILDCARD = 1
    END = 2
    REST = 3


@dataclass(frozen=True, slots=True)
class Capture:
    """A variable: the field it sets and the segments ``[start, end)`` it covers, end None: ``**``.

    Attributes:
        field_path: dotted names of the request's fields.
        start: first segment, counted from the front.
        after: number of segments behind the variable.
        is_single: whether it is one ``*``; then ``%2F`` is decoded too.
    """

    field_path: str
    start: int
    after: int
    is_single: bool


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """One template.

    Attributes:
        segments: literals, ``*`` or ``**``.
        verb: without its colon, or empty.
        captures: its variables.
    """

    segments: tuple[str, ...]
    verb: str
    captures: tuple[Capture, ...]

    @property
    def precedence(self) -> tuple[int, ...]:
        """Sort key: the most particular template first; equal means the same paths match."""
        ranks = {"*": _Rank.WILDCARD, "**": _Rank.REST}
        return (*(ranks.get(segment, _Rank.LITERAL) for segment in self.segments), _Rank.END)

    def match(self, segments: list[str]) -> Mapping[str, str] | None:
        """Give the variables' values if the raw (still encoded) segments fit, else None.

        Raises:
            MeshError: INVALID_ARGUMENT, an escape in a variable is not UTF-8.
        """
        if self.verb:
            last, colon, verb = segments[-1].rpartition(":")
            if not colon or verb != self.verb:
                return None
            segments = [*segments[:-1], last]
        rest = self.segments.index("**") if "**" in self.segments else None
        surplus = len(segments) - len(self.segments)
        if not all(segments) or (surplus != 0 and (rest is None or surplus < -1)):
            return None
        wanted = list(self.segments)
        if rest is not None:
            wanted[rest : rest + 1] = ["*"] * (surplus + 1)
        for want, segment in zip(wanted, segments, strict=True):
            if want != "*" and want != percent_decode(segment, "path"):
                return None
        values = {}
        for capture in self.captures:
            covered = segments[capture.start : len(segments) - capture.after]
            keep = b"" if capture.is_single else b"/"
            values[capture.field_path] = "/".join(
                percent_decode(segment, capture.field_path, keep) for segment in covered
            )
        return values


def parse_template(text: str) -> PathTemplate:
    """Read a template such as ``/v1/{name=nodes/*}:drain``.

    Raises:
        ValueError: not of http.proto's syntax, or ``**`` is not alone.
    """
    body, verb = text, ""
    colon = text.rfind(":")
    if colon > max(text.rfind("/"), text.rfind("}")):
        body, verb = text[:colon], text[colon + 1 :]
        if _LITERAL.fullmatch(verb) is None:
            raise ValueError(f"path template {text!r}: {verb!r} is no verb")
    if not body.startswith("/"):
        raise ValueError(f"path template {text!r}: expected a slash first")
    segments: list[str] = []
    spans: list[tuple[str, int, int]] = []
    for part in _SLASH.split(body[1:]):
        inner = part
        if part.startswith("{") and part.endswith("}"):
            path, _, pattern = part[1:-1].partition("=")
            inner = pattern or "*"
            if _FIELD_PATH.fullmatch(path) is None:
                raise ValueError(f"path template {text!r}: {path!r} is no field path")
            spans.append((path, len(segments), len(segments) + len(inner.split("/"))))
        for segment in inner.split("/"):
            if segment not in ("*", "**") and _LITERAL.fullmatch(segment) is None:
                raise ValueError(f"path template {text!r}: {segment!r} is no segment")
            segments.append(segment)
    if segments.count("**") > 1:
        raise ValueError(f"path template {text!r}: more than one **")
    captures = tuple(
        Capture(path, start, len(segments) - end, segments[start:end] == ["*"])
        for path, start, end in spans
    )
    if len({capture.field_path for capture in captures}) < len(captures):
        raise ValueError(f"path template {text!r}: a field is bound twice")
    return PathTemplate(tuple(segments), verb, captures)


def split_path(raw: str) -> list[str]:
    """Split a raw path into its segments, checking every escape.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    segments = raw.removeprefix("/").split("/")
    for segment in segments:
        percent_decode(segment, "path")
    return segments


def percent_decode(text: str, field: str, keep: bytes = b"") -> str:
    """Decode ``%XX`` once, leaving escapes of the bytes in `keep` as they are.

    Raises:
        MeshError: INVALID_ARGUMENT, a malformed escape or not UTF-8.
    """
    if "%" not in text and text.isascii():
        return text

    def decode(match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            raise invalid(field, f"malformed escape in {text[:200]!r}: expected % and two digits")
        byte = bytes.fromhex(match[1].decode())
        return match[0] if byte in keep and keep else byte

    raw = text.encode("utf-8", "surrogateescape")
    try:
        return _ESCAPE.sub(decode, raw).decode()
    except UnicodeDecodeError:
        raise invalid(field, f"{text[:200]!r} is not UTF-8") from None
