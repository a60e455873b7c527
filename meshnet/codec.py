"""Codings of an activation body by name, each decoded under an exact bound (pure).

Source: proto/WIRE.md, Bodies.
"""

from __future__ import annotations

from typing import Final, Protocol

from meshnet.bf16p import Bf16pCodec
from meshnet.dtypes import Body
from meshnet.errors import Code, WireError
from meshnet.zstd import ZstdCodec

__all__ = ["ENCODINGS", "Codec", "compress", "decompress", "decompress_within", "max_body_bytes"]

_FIELD: Final = "X-Meshnet-Encoding"
_ALLOWED_EXTRA_BYTES: Final = 64 * 1024


class Codec(Protocol):
    """One coding of bodies; its methods may be called from any thread."""

    def compress(self, data: Body, level: int, width: int | None, /) -> Body:
        """Encode `data`; see the function `compress`."""
        ...

    def decompress(self, body: memoryview, max_bytes: int, width: int | None, /) -> Body:
        """Decode the whole of `body` into at most `max_bytes` bytes of memory.

        Raises:
            ValueError: `body` is not exactly one well-formed body of at most `max_bytes`;
                the message says what was found and what was expected.
            ImportError: the decoder is not installed.
        """
        ...


_CODECS: Final[dict[str, Codec]] = {"zstd": ZstdCodec(), "bf16p": Bf16pCodec()}

ENCODINGS: Final = tuple(_CODECS)
"""Names of the encodings known here, for X-Meshnet-Accept-Encoding; raw has no name."""


def compress(encoding: str, data: Body, level: int = 1, *, width: int | None = None) -> Body:
    """Encode `data`, which is read in place.

    Args:
        encoding: one of `ENCODINGS`.
        data: C-contiguous; `meshnet.dtypes.view_bytes` gives a tensor's.
        level: effort, 0 to 22; 0 is the encoding's own default (zstd: level 3; bf16p:
            without its base).
        width: last dimension of a bfloat16 tensor, None for any other dtype;
            see `meshnet.wire.ChunkHeader.width`.

    Raises:
        WireError: an encoding that is not known here.
        ValueError: `level` out of range; bf16p: no `width`, or one that `data` does not fit.
        ImportError: the encoder is not installed.
        MemoryError: no memory for the encoder.
    """
    return _codec(encoding).compress(data, level, width)


def decompress(encoding: str | None, body: Body, num_bytes: int, width: int | None = None) -> Body:
    """Decode `body` to exactly `num_bytes` bytes; `width` as of `compress`.

    A raw body (`encoding` None) is viewed, not copied. For others no more than `num_bytes`
    are ever written, and the decoder's window is at most the greater of 8 MiB and
    `num_bytes`.

    Raises:
        WireError: `field` is Content-Length for a raw body of another length and for an
            encoded one over `max_body_bytes` (413), else X-Meshnet-Encoding: an unknown
            encoding, malformed, truncated or trailing bytes, fewer or more bytes than
            `num_bytes`.
    """
    if encoding is None:
        view = memoryview(body).cast("B")
        if len(view) != num_bytes:
            raise WireError(
                f"Content-Length: body has {len(view)} bytes; expected {num_bytes}",
                field="Content-Length",
            )
        return view
    data = decompress_within(encoding, body, num_bytes, width)
    if len(data) != num_bytes:
        raise _fault(f"{encoding} body decodes to {len(data)} bytes; expected {num_bytes}")
    return data


def decompress_within(encoding: str, body: Body, max_bytes: int, width: int | None = None) -> Body:
    """Decode `body` to at most `max_bytes` bytes, for callers that know no exact size.

    Raises:
        WireError: as `decompress`.
    """
    codec = _codec(encoding)
    view = memoryview(body).cast("B")
    limit = max_body_bytes(encoding, max_bytes)
    if len(view) > limit:
        raise WireError(
            f"Content-Length: {encoding} body has {len(view)} bytes; expected at most {limit}"
            f" for {max_bytes} decoded bytes",
            field="Content-Length",
            code=Code.TOO_LARGE,
        )
    try:
        return codec.decompress(view, max_bytes, width)
    except ValueError as error:
        raise _fault(f"{encoding} body: {error}") from None
    except ImportError as error:
        raise _fault(f"{encoding} cannot be read on this node: {error}") from None


def max_body_bytes(encoding: str | None, num_bytes: int) -> int:
    """Give the longest body that can be read for a tensor of `num_bytes` bytes.

    For an encoded body that is a sixteenth and 64 KiB more than raw, room for
    incompressible data in small blocks. A receiver refuses a longer Content-Length before
    it reads the body.
    """
    if encoding is None:
        return num_bytes
    return num_bytes + num_bytes // 16 + _ALLOWED_EXTRA_BYTES


def _codec(encoding: str) -> Codec:
    codec = _CODECS.get(encoding)
    if codec is None:
        raise _fault(
            f"{encoding[:80]!r} is not known here; expected one of: {', '.join(ENCODINGS)}"
        )
    return codec


def _fault(what: str) -> WireError:
    return WireError(f"{_FIELD}: {what}", field=_FIELD)
