"""Secrets that are kept as hashes only: of join tokens, operators' tokens and API keys.

They are random and long, so that a plain hash of one tells nobody anything: it needs no salt and
no slow hash function.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["hash_secret", "is_secret"]


def hash_secret(secret: str) -> str:
    """Give the SHA-256 of a secret, in hexadecimal."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def is_secret(secret: str, hashed: str) -> bool:
    """Tell whether it is the one with this hash; takes the same time whatever differs.

    An empty hash is of no secret.
    """
    return hmac.compare_digest(hashed, hash_secret(secret))
