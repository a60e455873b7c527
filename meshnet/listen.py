"""Taking an address to listen on, with an error that names it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Final

from meshnet.errors import ConfigError

__all__ = ["ANY_HOSTS", "BACKLOG", "host_port", "listen", "refuse_exposed"]

ANY_HOSTS: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
"""Hosts that stand for every address of a machine; where others reach it they do not tell."""

BACKLOG: Final = 512


async def listen(host: str, port: int, setting: str) -> socket.socket:
    """Take an address, so that nobody else can; connections wait until it is served.

    Args:
        host: name or address of an interface of this machine.
        port: 0 for any.
        setting: name of the setting that an error is about.

    Raises:
        ConfigError: the address is taken or not this machine's.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise _unusable(host, port, setting, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _unusable(host, port, setting, error) from None
    return listener


async def refuse_exposed(
    host: str, port: int, setting: str, remedy: str, danger: str = "anybody could use it"
) -> None:
    """Refuse an address that other machines reach; a host that is not found passes.

    Args:
        host: name or address; of a name, every address that it has counts.
        port: see there.
        setting: name of the setting that an error is about.
        remedy: what would make it safe.
        danger: what it is not safe from.

    Raises:
        ConfigError: it is not of loopback alone.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError):
        return
    if not all(_is_loopback(str(address[0])) for *_, address in found):
        raise ConfigError(
            f"refusing to listen on {host_port(host, port)}, where other machines reach it and "
            f"{danger}: {remedy}, or allow it with --insecure",
            field=setting,
        )


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def host_port(host: str, port: int) -> str:
    """Join host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unusable(host: str, port: int, setting: str, error: Exception) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"cannot listen on {host_port(host, port)}: {why.lower()}", field=setting)
