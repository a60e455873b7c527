"""Stores of documents for tests: opened, and emptied."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshnet.control.documents import Documents
from meshnet.control.etcd.client import EtcdClient
from meshnet.control.store_url import make_documents
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from tests.control.etcd_cluster import Cluster


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Documents]:
    documents = make_documents(url)
    await documents.open()
    try:
        yield documents
    finally:
        await documents.close()


async def empty(cluster: Cluster) -> None:
    client = EtcdClient(list(cluster.addresses.values()))
    prefix = b"/meshnet/documents/"
    whole = etcd.DeleteRangeRequest(key=prefix, range_end=prefix[:-1] + b"0")
    await client.txn(etcd.TxnRequest(success=[etcd.RequestOp(request_delete_range=whole)]))
    await client.close()
