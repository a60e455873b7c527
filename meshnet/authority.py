"""The certificate authority of a mesh, in a file of the control plane's state directory.

An authority is rotated without a break: the new key is certified by the old one too, and
certificates come with that proof. So whoever knows only the old root accepts what the new
one issues, and whoever has the new list of roots accepts what the old one issued.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from meshnet.certificates import (
    CLOCK_SKEW_S,
    Period,
    cross_certificate,
    leaf_certificate,
    make_key,
    pem_of,
    pem_of_key,
    read_key,
    root_certificate,
    spki_sha256,
)
from meshnet.errors import ConfigError
from meshnet.identity import CONTROL_DNS_NAME, Identity, Role
from meshnet.private_files import make_private_dir, read_private, write_private

__all__ = ["AUTHORITY_FILE", "DEFAULT_LIFE_S", "DEFAULT_OVERLAP_S", "Authority", "Issued"]

AUTHORITY_FILE: Final = "authority.json"
"""Its file, in the state directory."""

DEFAULT_LIFE_S: Final = 24 * 3600.0
"""How long a certificate is good."""

DEFAULT_OVERLAP_S: Final = 7 * 24 * 3600.0
"""How long an old root is trusted beside the new one: as long as any join token lives."""

_ROOT_LIFE_S: Final = 10 * 365 * 24 * 3600.0
_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, and what belongs to it.

    Attributes:
        chain_pem: the certificate, followed by proofs for those who know only older roots.
        bundle_pem: all roots to trust now.
        renew_s: when to renew it, seconds since 1970.
        expire_s: when it ends, seconds since 1970.
    """

    chain_pem: str
    bundle_pem: str
    renew_s: float
    expire_s: float


@dataclass(frozen=True, slots=True)
class _Root:
    """A root that is trusted.

    Attributes:
        certificate: signed by itself.
        proof: the next newer root's key, certified by this one; None of the newest.
        retire_s: when to trust it no more, seconds since 1970; None of the newest.
    """

    certificate: x509.Certificate
    proof: x509.Certificate | None = None
    retire_s: float | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """What the file holds: the key of the newest root, and all roots, the newest first."""

    key: ec.EllipticCurvePrivateKey
    roots: tuple[_Root, ...]


class Authority:
    """Certifies keys; made and rotated by any process that may write its directory.

    A rotation by another process is noticed at the next call.

    Args:
        folder: its state directory; made, with a new authority, where there is none.
        life_s: how long certificates are good.
        wall_clock: seconds since 1970.

    Raises:
        ConfigError: the directory or its file cannot be used, naming it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        life_s: float = DEFAULT_LIFE_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.life_s = life_s
        self._path = folder / AUTHORITY_FILE
        self._wall_clock = wall_clock
        make_private_dir(folder)
        if not self._path.exists():
            key = make_key()
            self._write(_State(key, (_Root(self._root(key)),)), keep=True)
        self._stamp = self._file_stamp()
        self._state = _read(self._path)

    @property
    def spki_sha256(self) -> str:
        """SHA-256 of the public key that certifies now, in hexadecimal."""
        return spki_sha256(self._current().key.public_key())

    @property
    def bundle_pem(self) -> str:
        """All roots to trust now, the one that certifies first."""
        return pem_of(*(root.certificate for root in self._live()))

    def issue(
        self, identity: Identity, key: ec.EllipticCurvePublicKey, hosts: Iterable[str] = ()
    ) -> Issued:
        """Certify a key.

        Args:
            identity: whose it is.
            key: certified.
            hosts: DNS names and addresses for which the certificate is good too.

        Raises:
            ConfigError: the file was changed to something else.
        """
        now_s = self._wall_clock()
        live = self._live()
        names = (CONTROL_DNS_NAME, *hosts) if identity.role is Role.CONTROL else tuple(hosts)
        expire_s = now_s + self.life_s
        leaf = leaf_certificate(
            identity,
            key,
            live[0].certificate,
            self._state.key,
            Period(now_s - CLOCK_SKEW_S, expire_s),
            names,
        )
        proofs = [root.proof for root in live if root.proof is not None]
        return Issued(
            chain_pem=pem_of(leaf, *proofs),
            bundle_pem=pem_of(*(root.certificate for root in live)),
            renew_s=now_s + self.life_s / 2,
            expire_s=expire_s,
        )

    def rotate(self, overlap_s: float = DEFAULT_OVERLAP_S) -> None:
        """Certify by a new key from now on; older roots are trusted for `overlap_s` more.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        live = self._live()
        newest, *older = live
        key = make_key()
        root = self._root(key)
        retire_s = self._wall_clock() + overlap_s
        before = _Root(
            newest.certificate,
            cross_certificate(root, key.public_key(), newest.certificate, self._state.key),
            retire_s,
        )
        self._write(_State(key, (_Root(root), before, *older)))

    def _root(self, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
        now_s = self._wall_clock()
        return root_certificate(key, Period(now_s - CLOCK_SKEW_S, now_s + _ROOT_LIFE_S))

    def _live(self) -> tuple[_Root, ...]:
        """Give the roots to trust now, the newest first."""
        now_s = self._wall_clock()
        roots = self._current().roots
        return tuple(root for root in roots if root.retire_s is None or root.retire_s > now_s)

    def _current(self) -> _State:
        """Give the state, read again where the file was replaced."""
        stamp = self._file_stamp()
        if stamp != self._stamp:
            self._state, self._stamp = _read(self._path), stamp
        return self._state

    def _file_stamp(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}", field=str(self._path)) from None
        return found.st_ino, found.st_mtime_ns

    def _write(self, state: _State, *, keep: bool = False) -> None:
        kept = {
            "version": _VERSION,
            "key": pem_of_key(state.key).decode(),
            "roots": [
                {
                    "certificate": pem_of(root.certificate),
                    "proof": None if root.proof is None else pem_of(root.proof),
                    "retire_s": root.retire_s,
                }
                for root in state.roots
            ],
        }
        write_private(self._path, json.dumps(kept, indent=1).encode(), keep=keep)


def _read(path: Path) -> _State:
    """Read what an authority wrote.

    Raises:
        ConfigError: it is something else, or readable by others.
    """
    data = read_private(path, _MAX_BYTES)
    try:
        kept: Any = json.loads(data or b"")
        if kept["version"] != _VERSION:
            raise ValueError(f"version {kept['version']!r}, expected {_VERSION}")
        state = _State(
            read_key(str(kept["key"]).encode()),
            tuple(
                _Root(
                    _certificate(item["certificate"]),
                    None if item["proof"] is None else _certificate(item["proof"]),
                    None if item["retire_s"] is None else float(item["retire_s"]),
                )
                for item in kept["roots"]
            ),
        )
        if state.roots[0].certificate.public_key() != state.key.public_key():
            raise ValueError("the first root is not of the key")
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{path} is no authority's file ({type(error).__name__}: {error})"[:500],
            field=str(path),
        ) from None
    return state


def _certificate(pem: object) -> x509.Certificate:
    return x509.load_pem_x509_certificate(str(pem).encode())
