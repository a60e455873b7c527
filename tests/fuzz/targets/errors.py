"""What every error for a user must be."""

from __future__ import annotations

from meshnet.errors import MeshError

__all__ = ["check_error"]

_MAX_MESSAGE = 2000


def check_error(error: MeshError) -> None:
    """Assert that a person can read it: one line of bounded length, and a client's fault."""
    assert 0 < len(error.message) <= _MAX_MESSAGE, len(error.message)
    assert "\n" not in error.message, error.message
    assert error.code.http_status < 500, error.code
