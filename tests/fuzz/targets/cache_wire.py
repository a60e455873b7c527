"""Header fields of a KV cache on its way and of a move (`meshnet.cache_wire`)."""

from __future__ import annotations

from meshnet.cache_wire import pack_cache, pack_move, unpack_cache, unpack_move
from meshnet.errors import WireError
from meshnet.topology import SessionId
from tests.fuzz.targets.errors import check_error
from tests.fuzz.targets.fields import read_fields

SESSION = SessionId("8d7f2f0a-0000-4000-8000-000000000001")


def check(data: bytes) -> None:
    fields = read_fields(data)
    for unpack, pack in ((unpack_cache, pack_cache), (unpack_move, pack_move)):
        try:
            header = unpack(SESSION, fields)
        except WireError as error:
            check_error(error)
        else:
            assert unpack(SESSION, pack(header)) == header
