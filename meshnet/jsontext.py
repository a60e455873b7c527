"""How deep and how branched JSON text may be, told before it is parsed (pure).

A parser makes an object of some 60 bytes of each ``[]``: text that is small takes twenty times
its memory, and recursion ends at a depth that depends on who called.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_CONTAINERS", "MAX_DEPTH", "check_nesting"]

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 200_000

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or the rest of the text where it does not end. No text takes this back a step: one
that tried each quote of a string without an end would take time that grows as its square."""

_OPENING: Final = b"[{"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def check_nesting(
    text: bytes | bytearray, *, max_depth: int = MAX_DEPTH, max_containers: int = MAX_CONTAINERS
) -> None:
    """Check the nesting of UTF-8 text that may be JSON; what is not is left to the parser.

    Raises:
        ValueError: nested too deeply, or too many arrays and objects; says the bound.
    """
    if text.count(b"[") + text.count(b"{") <= max_depth:
        return
    brackets = _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    num_containers = brackets.count(b"[") + brackets.count(b"{")
    if num_containers > max_containers:
        raise ValueError(f"{num_containers} arrays and objects; expected at most {max_containers}")
    if len(brackets) > 2 * max_containers:
        raise ValueError("more arrays and objects are closed than were opened")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in _OPENING else -1
        if depth > max_depth:
            raise ValueError(f"nested too deeply; expected at most {max_depth} levels")
