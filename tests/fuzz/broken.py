"""A target with a fault, so that a test can see the fuzzer find one."""

from __future__ import annotations


def check(data: bytes) -> None:
    if data.startswith(b"x"):
        raise ZeroDivisionError
