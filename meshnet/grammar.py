"""Values of the activation plane's header fields (pure).

Every parser raises ValueError with what was expected, and nothing else.
Source: proto/WIRE.md, Requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from meshnet.dtypes import BFLOAT16, DTYPES, FLOAT32, INT32
from meshnet.topology import Hop, LayerRange, Route, SessionId, parse_layers, parse_node_id

__all__ = [
    "MAX_DIMENSIONS",
    "MAX_GRANT_CHARS",
    "Phase",
    "Want",
    "format_route",
    "parse_count",
    "parse_dtype",
    "parse_encoding",
    "parse_encodings",
    "parse_flag",
    "parse_grant",
    "parse_phase",
    "parse_positive",
    "parse_route",
    "parse_session",
    "parse_shape",
    "parse_traceparent",
    "parse_want",
    "parse_wire_layers",
]

MAX_DIMENSIONS: Final = 8
MAX_GRANT_CHARS: Final = 8192
_MAX_DIGITS: Final = 20
_MAX_HOPS: Final = 64

_HOP = re.compile(
    r"(?P<node>[a-z][a-z0-9-]{0,62})@"
    r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[1-9][0-9]{0,4})"
    r"/(?P<layers>[0-9]{1,6}-[0-9]{1,6})"
)
_DIGITS = re.compile(r"[0-9]{1,20}")
_DIMENSION = re.compile(r"[1-9][0-9]{0,19}")
_TOKEN = re.compile(r"[a-z][a-z0-9-]{0,31}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TRACEPARENT = re.compile(
    r"(?!ff)(?!00-.{52}-)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    r"(-[!-~]{0,256})?"
)
_GRANT = re.compile(r"[A-Za-z0-9_.-]+")
_WANT = re.compile(r"(?P<kind>hidden|logits|none)|top-(?P<top>[1-9][0-9]{0,4})")


class Phase(StrEnum):
    """What a chunk is part of; a policy's key, not a difference in the computation."""

    PREFILL = "prefill"
    """The prompt: many positions per forward."""
    DECODE = "decode"
    """Generation: one position per forward."""


@dataclass(frozen=True, slots=True)
class Want:
    """What the last hop answers with.

    Attributes:
        kind: ``hidden``, ``logits``, ``top`` or ``none``.
        top: for ``top``, the number of candidates, else 0.
    """

    kind: str
    top: int = 0

    def __str__(self) -> str:
        """Write as the wire does, for example ``top-20``."""
        return f"top-{self.top}" if self.kind == "top" else self.kind


@lru_cache(maxsize=1024)
def parse_route(text: str) -> Route:
    """Read ``node@host:port/start-end`` hops joined by commas; cached, since a session repeats it.

    Raises:
        ValueError: out of that grammar, or more than 64 hops.
    """
    hops = []
    for item in text.split(","):
        match = _HOP.fullmatch(item.strip(" \t"))
        if match is None or int(match["port"]) > 65535:
            raise ValueError("hops NODE@HOST:PORT/START-END joined by commas")
        node = parse_node_id(match["node"])
        layers = parse_wire_layers(match["layers"])
        hops.append(Hop(node, f"{match['host']}:{match['port']}", layers))
    if len(hops) > _MAX_HOPS:
        raise ValueError(f"at most {_MAX_HOPS} hops")
    return tuple(hops)


@lru_cache(maxsize=1024)
def format_route(route: Route) -> str:
    """Write hops as `parse_route` reads them; cached, since a session repeats it."""
    return ",".join(f"{hop.node}@{hop.address}/{hop.layers}" for hop in route)


def parse_shape(text: str) -> tuple[int, ...]:
    """Read dimensions joined by commas."""
    items = text.split(",", MAX_DIMENSIONS)
    if len(items) > MAX_DIMENSIONS or not all(map(_DIMENSION.fullmatch, items)):
        raise ValueError(
            "1 to 8 dimensions, each at least 1, digits joined by ',' without sign,"
            " space or leading zero"
        )
    return tuple(map(int, items))


def parse_dtype(text: str) -> str:
    """Read the name of an element type."""
    if text not in DTYPES:
        raise ValueError(f"{BFLOAT16}, {INT32} or {FLOAT32} in lower case")
    return text


def parse_session(text: str) -> SessionId:
    """Read a canonical UUID."""
    if _UUID.fullmatch(text) is None:
        raise ValueError("a UUID in canonical form: lower case, 8-4-4-4-12 hexadecimal digits")
    return SessionId(text)


def parse_count(text: str) -> int:
    """Read a number of 0 or more."""
    if _DIGITS.fullmatch(text) is None:
        raise ValueError(f"1 to {_MAX_DIGITS} digits")
    return int(text)


def parse_flag(text: str) -> bool:
    """Read a field that says something by being there."""
    if text != "1":
        raise ValueError("1, or no such field")
    return True


def parse_grant(text: str) -> str:
    """Read a route grant's text, whatever it says; `meshnet.grants` checks that."""
    if len(text) > MAX_GRANT_CHARS or _GRANT.fullmatch(text) is None:
        raise ValueError(f"1 to {MAX_GRANT_CHARS} of A-Z, a-z, 0-9, '-', '_' and '.'")
    return text


def parse_positive(text: str) -> int:
    """Read a number of 1 or more."""
    value = parse_count(text)
    if value == 0:
        raise ValueError("a number of at least 1")
    return value


def parse_wire_layers(text: str) -> LayerRange:
    """Read a half-open layer range, ``start-end``."""
    expected = "layers START-END, half-open, with START < END"
    if ":" in text:
        raise ValueError(expected)
    try:
        return parse_layers(text)
    except ValueError:
        raise ValueError(expected) from None


def parse_phase(text: str) -> Phase:
    """Read ``prefill`` or ``decode``."""
    try:
        return Phase(text)
    except ValueError:
        raise ValueError("prefill or decode") from None


def parse_want(text: str) -> Want:
    """Read what the caller wants answered."""
    match = _WANT.fullmatch(text)
    if match is None:
        raise ValueError("hidden, logits, none or top-K with K from 1 to 99999")
    return Want("top", int(match["top"])) if match["top"] else Want(match["kind"])


def parse_encoding(text: str) -> str:
    """Read one encoding's name; ``identity`` is not one."""
    if _TOKEN.fullmatch(text) is None or text == "identity":
        raise ValueError("the name of one encoding, as zstd; raw bodies have no such header")
    return text


def parse_encodings(text: str) -> tuple[str, ...]:
    """Read names of encodings joined by commas."""
    names = tuple(item.strip(" \t") for item in text.split(","))
    if len(names) > 16 or not all(map(_TOKEN.fullmatch, names)):
        raise ValueError("at most 16 names of encodings joined by commas")
    return names


def parse_traceparent(text: str) -> str:
    """Read a W3C trace context; a version above 00 may carry more after the flags."""
    if _TRACEPARENT.fullmatch(text) is None:
        raise ValueError("a W3C trace context: version-traceid-parentid-flags")
    return text
