"""The keys of a registry in etcd, and the conditions and operations on them.

/meshnet/v1/nodes/ID    NodeRecord; stays when the node is lost
/meshnet/v1/alive/ID    empty, under the node's etcd lease: gone once that has ended
/meshnet/v1/reports/ID  Report of the last published heartbeat
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message

from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from meshnet.topology import NodeId

__all__ = [
    "ALIVE",
    "NODES",
    "PREFIX",
    "REPORTS",
    "delete",
    "get",
    "holds_lease",
    "key",
    "put",
    "split",
    "unchanged",
]

PREFIX: Final = b"/meshnet/v1/"
NODES: Final = "nodes"
ALIVE: Final = "alive"
REPORTS: Final = "reports"


def key(kind: str, node_id: NodeId) -> bytes:
    """Give the key of one kind of value of a node."""
    return PREFIX + f"{kind}/{node_id}".encode()


def split(name: bytes) -> tuple[str, NodeId]:
    """Give kind and node of a key under the prefix; kind is empty for one of nobody known."""
    kind, _, node_id = name.removeprefix(PREFIX).decode("utf-8", "replace").partition("/")
    return (kind, NodeId(node_id)) if kind in (NODES, ALIVE, REPORTS) else ("", NodeId(""))


def get(kind: str, node_id: NodeId) -> etcd.RequestOp:
    """Read a value."""
    return etcd.RequestOp(request_range=etcd.RangeRequest(key=key(kind, node_id)))


def put(kind: str, node_id: NodeId, value: Message | None, lease: int = 0) -> etcd.RequestOp:
    """Write a value, under a lease unless that is 0."""
    written = b"" if value is None else value.SerializeToString(deterministic=True)
    return etcd.RequestOp(
        request_put=etcd.PutRequest(key=key(kind, node_id), value=written, lease=lease)
    )


def delete(kind: str, node_id: NodeId) -> etcd.RequestOp:
    """Remove a value."""
    return etcd.RequestOp(request_delete_range=etcd.DeleteRangeRequest(key=key(kind, node_id)))


def unchanged(kind: str, node_id: NodeId, revision: int) -> etcd.Compare:
    """Demand that a value was last written at `revision`; 0 demands that there is none."""
    return etcd.Compare(target=etcd.Compare.MOD, key=key(kind, node_id), mod_revision=revision)


def holds_lease(node_id: NodeId, lease: int) -> etcd.Compare:
    """Demand that the node is alive under `lease`."""
    return etcd.Compare(target=etcd.Compare.LEASE, key=key(ALIVE, node_id), lease=lease)
