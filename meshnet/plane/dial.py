"""Addresses of nodes, and what every socket of the plane is set to."""

from __future__ import annotations

import re
import socket

__all__ = ["no_host_name", "set_up", "split_host_port"]

_ADDRESS = re.compile(r"(?P<host>[^\s\[\]:/@]+|\[(?P<six>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{1,5})")
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""A host that went away without a word is noticed within half a minute, not hours."""


def split_host_port(address: str) -> tuple[str, int]:
    """Split ``host:port``, with brackets around an IPv6 address.

    Raises:
        OSError: it is not that.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise OSError(f"address {address!r}: expected HOST:PORT")
    return match["six"] or match["host"], int(match["port"])


def no_host_name(address: str, host: str) -> OSError:
    """Give the error of a host that cannot be one."""
    return OSError(f"address {address!r}: {host!r} is no host name")


def set_up(sock: socket.socket) -> None:
    """Send small messages at once, and notice a host that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
