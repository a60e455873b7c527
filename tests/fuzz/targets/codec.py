"""Encoded bodies (`meshnet.codec`: zstd, bf16p): exact bytes or a WireError, in bounded memory.

The first byte chooses the encoding, the second the width of a row, the next two the number
of rows that the header promised.
"""

from __future__ import annotations

from meshnet.codec import ENCODINGS, compress, decompress, decompress_within
from meshnet.errors import WireError
from tests.fuzz.targets.errors import check_error

LARGEST = 1 << 20


def check(data: bytes) -> None:
    if len(data) < 4:
        return
    encoding = ENCODINGS[data[0] % len(ENCODINGS)]
    width = data[1] + 1
    rows = int.from_bytes(data[2:4], "little")
    num_bytes = min(2 * width * rows, LARGEST)
    body = data[4:]
    try:
        decoded = decompress(encoding, body, num_bytes, width)
    except WireError as error:
        check_error(error)
        return
    raw = bytes(decoded)
    assert len(raw) == num_bytes
    assert bytes(decompress_within(encoding, body, num_bytes + 2 * width, width)) == raw
    if num_bytes <= 1 << 14:
        again = compress(encoding, raw, width=width)
        assert bytes(decompress(encoding, again, num_bytes, width)) == raw
