"""Read, decide, write if nothing changed meanwhile: one node at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from meshnet.control.etcd.client import EtcdClient, LeaseGoneError
from meshnet.control.etcd.keys import ALIVE, NODES, delete, get, put, unchanged
from meshnet.errors import Code, MeshError
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from meshnet.internal.store.v1 import record_pb2
from meshnet.topology import NodeId

__all__ = ["Held", "Write", "read", "transact"]

MAX_TRIES: Final = 16


@dataclass(frozen=True, slots=True)
class Held:
    """What etcd holds of one node.

    Attributes:
        stored: its record; None if it is not registered.
        revision: at which that was last written; 0 for none.
        alive: the etcd lease that the node is alive under; 0 if none.
        alive_revision: at which that was last written; 0 for none.
    """

    stored: record_pb2.NodeRecord | None
    revision: int
    alive: int
    alive_revision: int


@dataclass(frozen=True, slots=True)
class Write:
    """What to do if the node's record is still as it was read.

    Attributes:
        stored: the record to write; None removes it.
        operations: what to do beside.
        conditions: what has to be true beside.
    """

    stored: record_pb2.NodeRecord | None
    operations: Sequence[etcd.RequestOp] = ()
    conditions: Sequence[etcd.Compare] = ()


async def read(client: EtcdClient, node_id: NodeId) -> Held:
    """Give what is committed now.

    Raises:
        MeshError: UNAVAILABLE.
    """
    request = etcd.TxnRequest(success=[get(NODES, node_id), get(ALIVE, node_id)])
    response = await client.txn(request)
    node, alive = (list(answer.response_range.kvs) for answer in response.responses)
    return Held(
        stored=record_pb2.NodeRecord.FromString(node[0].value) if node else None,
        revision=node[0].mod_revision if node else 0,
        alive=alive[0].lease if alive else 0,
        alive_revision=alive[0].mod_revision if alive else 0,
    )


async def transact(
    client: EtcdClient, node_id: NodeId, decide: Callable[[Held], Awaitable[Write]]
) -> tuple[record_pb2.NodeRecord | None, int]:
    """Write what `decide` makes of what is held; again from the start if that has changed.

    Gives the record and the revision at which it was written; 0 if the record is gone and
    it is not known since when.

    Raises:
        MeshError: what `decide` raised; UNAVAILABLE; ABORTED, others change it all the time.
    """
    written: Write | None = None
    for _ in range(MAX_TRIES):
        held = await read(client, node_id)
        if written is not None and held.stored == written.stored:
            # not a conflict: an attempt whose answer was lost had done it
            return held.stored, held.revision
        written = await decide(held)
        record = written.stored
        request = etcd.TxnRequest(
            compare=[unchanged(NODES, node_id, held.revision), *written.conditions],
            success=[
                delete(NODES, node_id) if record is None else put(NODES, node_id, record),
                *written.operations,
            ],
        )
        try:
            response = await client.txn(request)
        except LeaseGoneError:
            written = None
            continue
        if response.succeeded:
            return record, response.header.revision
    raise MeshError(
        Code.ABORTED,
        f"node {node_id!r} is being changed by others: try again",
        reason="CONTENDED",
        retry_after_s=1.0,
    )
