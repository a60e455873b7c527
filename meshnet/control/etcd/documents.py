"""Documents in etcd: /meshnet/documents/v1/KIND/KEY, away from the registry's prefix."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import grpc

from meshnet.control.documents import Document, check_document, conflict
from meshnet.control.etcd.client import EtcdClient, range_end
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd

__all__ = ["EtcdDocuments"]

_PREFIX: Final = "/meshnet/documents/v1/"
_MARK_BYTES: Final = 16
"""A stored value begins with random bytes of its write. A call that got no answer is made
again; by these, the second try tells the first one's write from another's of the same value."""


class EtcdDocuments:
    """Records that all who reach the cluster share.

    Args:
        addresses: ``host:port`` of etcd's members.
        tls: for TLS; None for none.
    """

    def __init__(
        self, addresses: Sequence[str], tls: grpc.ChannelCredentials | None = None
    ) -> None:
        self._client = EtcdClient(addresses, tls)

    async def open(self) -> None:
        """Ask etcd whether it is there.

        Raises:
            MeshError: UNAVAILABLE.
        """
        await self._client.range(etcd.RangeRequest(key=_PREFIX.encode()))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def get(self, kind: str, key: str) -> Document | None:
        """Give one record, as last committed."""
        response = await self._client.range(etcd.RangeRequest(key=_name(kind, key)))
        return _document(response.kvs[0], kind) if response.kvs else None

    async def list(self, kind: str) -> list[Document]:
        """Give all records of a kind, in order of key."""
        prefix = _name(kind, "")
        request = etcd.RangeRequest(key=prefix, range_end=range_end(prefix))
        response = await self._client.range(request)
        return [_document(pair, kind) for pair in response.kvs]

    async def put(self, kind: str, key: str, value: bytes, *, expected: int | None = None) -> int:
        """Write a record; gives its new revision.

        Raises:
            MeshError: ABORTED, it is not as expected; INVALID_ARGUMENT; UNAVAILABLE, it may
                have been written nevertheless.
        """
        check_document(kind, key, value)
        name = _name(kind, key)
        mark = secrets.token_bytes(_MARK_BYTES)
        compare = (
            []
            if expected is None
            else [etcd.Compare(target=etcd.Compare.MOD, key=name, mod_revision=expected)]
        )
        response = await self._client.txn(
            etcd.TxnRequest(
                compare=compare,
                success=[etcd.RequestOp(request_put=etcd.PutRequest(key=name, value=mark + value))],
                failure=[etcd.RequestOp(request_range=etcd.RangeRequest(key=name))],
            )
        )
        if response.succeeded:
            return response.header.revision
        for pair in response.responses[0].response_range.kvs:
            if pair.value[:_MARK_BYTES] == mark:
                return pair.mod_revision
        raise conflict(kind, key)

    async def delete(self, kind: str, key: str) -> bool:
        """Delete a record; tells whether there was one."""
        request = etcd.DeleteRangeRequest(key=_name(kind, key))
        response = await self._client.txn(
            etcd.TxnRequest(success=[etcd.RequestOp(request_delete_range=request)])
        )
        return response.responses[0].response_delete_range.deleted > 0


def _name(kind: str, key: str) -> bytes:
    return f"{_PREFIX}{kind}/{key}".encode()


def _document(pair: etcd.KeyValue, kind: str) -> Document:
    key = pair.key[len(_name(kind, "")) :].decode("utf-8", "replace")
    return Document(key, pair.value[_MARK_BYTES:], pair.mod_revision)
