"""NodeService: registration, heartbeats, listing, draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from meshnet.control.grant_issuer import GrantIssuer
from meshnet.control.paging import page_of
from meshnet.control.probe_messages import check_reports
from meshnet.control.registry import Event, Store
from meshnet.control.validate import (
    check_labels,
    check_load,
    check_model,
    check_node,
    check_node_id,
    check_required,
    check_weight,
    invalid,
    node_id_of,
)
from meshnet.control.verification import Verifier
from meshnet.errors import Code, MeshError
from meshnet.lease import Lease
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["LeaseTimes", "NodeService"]

MAX_GRACE_S: Final = 24 * 3600.0
MAX_REASON: Final = 256
_UPDATABLE: Final = ("labels", "weight", "cordoned")


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds: the lease granted unless asked otherwise, its bounds, the default drain grace."""

    ttl_s: float = 10.0
    min_ttl_s: float = 1.0
    max_ttl_s: float = 300.0
    drain_grace_s: float = 600.0


class NodeService:
    """Servicer of meshnet.v1.NodeService, for both faces.

    Every method raises MeshError alone; `rpc` turns it into the call's status.
    """

    def __init__(
        self,
        store: Store,
        times: LeaseTimes,
        verifier: Verifier | None = None,
        *,
        bookmark_interval_s: float = 10.0,
        grants: GrantIssuer | None = None,
    ) -> None:
        self._store = store
        self._verifier = verifier
        self._times = times
        self._bookmark_interval_s = bookmark_interval_s
        self._grants = grants

    async def RegisterNode(  # noqa: N802 - the schema's name
        self, request: pb.RegisterNodeRequest, _context: object
    ) -> pb.RegisterNodeResponse:
        """Register a node."""
        check_required(request)
        node_id = check_node_id(request.node_id)
        if request.node.name not in ("", f"nodes/{node_id}"):
            raise invalid("node.name", f"{request.node.name[:100]!r} is not nodes/{node_id}")
        address = check_node(request.node)
        ttl_s = self._times.ttl_s
        if request.HasField("requested_ttl"):
            asked_s = _seconds(request.requested_ttl.ToNanoseconds(), "requested_ttl")
            ttl_s = min(max(asked_s, self._times.min_ttl_s), self._times.max_ttl_s)
        node, lease, revision = await self._store.register(node_id, request.node, address, ttl_s)
        return pb.RegisterNodeResponse(
            node=node, lease=_lease(lease), revision=revision, grants=await self._policy()
        )

    async def Heartbeat(  # noqa: N802
        self, request: pb.HeartbeatRequest, _context: object
    ) -> pb.HeartbeatResponse:
        """Renew a node's lease."""
        check_required(request)
        check_load(request.load, "load")
        check_reports(request.probes)
        verifier = self._verifier
        if verifier is not None:
            await verifier.prepare()
        beat = await self._store.heartbeat(
            node_id_of(request.name), request, verifier.judge if verifier is not None else None
        )
        response = pb.HeartbeatResponse(
            lease=_lease(beat.lease),
            desired_state=beat.desired_state,
            revision=beat.revision,
            grants=await self._policy(),
            verification=beat.verification,
            probes_wanted=verifier is not None and verifier.is_asked(request.name),
        )
        if beat.drain_remaining_s is not None:
            response.drain_remaining.FromMilliseconds(int(beat.drain_remaining_s * 1000))
        return response

    async def GetNode(  # noqa: N802
        self, request: pb.GetNodeRequest, _context: object
    ) -> pb.GetNodeResponse:
        """Give one node."""
        check_required(request)
        return pb.GetNodeResponse(node=await self._store.get(node_id_of(request.name)))

    async def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, _context: object
    ) -> pb.ListNodesResponse:
        """Give a page of the nodes that pass the filters."""
        if request.model:
            check_model(request.model, "model")
        snapshot = await self._store.snapshot()
        states = set(request.states)
        passing = [
            (node.name, node)
            for node in snapshot.nodes
            if (not states or node.state in states)
            and (not request.model or request.model in (shard.model for shard in node.shards))
            and request.region in ("", node.location.region)
        ]
        page, token = page_of(request, passing)
        return pb.ListNodesResponse(nodes=page, next_page_token=token, revision=snapshot.revision)

    async def UpdateNode(  # noqa: N802
        self, request: pb.UpdateNodeRequest, _context: object
    ) -> pb.UpdateNodeResponse:
        """Change labels, weight or cordoned; without a mask, those that are set."""
        wanted = request.node
        node_id = node_id_of(wanted.name, "node.name")
        paths = [path for path in request.update_mask.paths if path not in ("name", "etag")]
        if not request.update_mask.paths:
            paths = [descriptor.name for descriptor, _ in wanted.ListFields()]
            paths = [path for path in paths if path in _UPDATABLE]
        elif paths == ["*"]:
            paths = list(_UPDATABLE)
        for path in paths:
            if path not in _UPDATABLE:
                raise invalid(
                    "update_mask", f"{path[:100]!r}: expected some of {', '.join(_UPDATABLE)}"
                )
        check_labels(wanted.labels.items(), "node.labels")
        check_weight(wanted.weight, "node.weight")

        def change(node: pb.Node) -> None:
            for path in paths:
                node.ClearField(path)
            if "labels" in paths:
                node.labels.MergeFrom(wanted.labels)
            if "weight" in paths:
                node.weight = wanted.weight
            if "cordoned" in paths:
                node.cordoned = wanted.cordoned

        node = await self._store.update(node_id, wanted.etag, change)
        return pb.UpdateNodeResponse(node=node)

    async def DrainNode(  # noqa: N802
        self, request: pb.DrainNodeRequest, _context: object
    ) -> pb.DrainNodeResponse:
        """Take a node off new routes and let its sessions end."""
        check_required(request)
        grace_s = self._times.drain_grace_s
        if request.HasField("grace_period"):
            grace_s = _seconds(request.grace_period.ToNanoseconds(), "grace_period") or grace_s
        node_id = node_id_of(request.name)
        if len(request.reason) > MAX_REASON:
            raise invalid("reason", f"expected at most {MAX_REASON} characters")
        grace_s = min(grace_s, MAX_GRACE_S)
        node = await self._store.drain(node_id, request.etag, grace_s, request.reason)
        return pb.DrainNodeResponse(node=node)

    async def DeregisterNode(  # noqa: N802
        self, request: pb.DeregisterNodeRequest, _context: object
    ) -> pb.DeregisterNodeResponse:
        """Remove a node."""
        check_required(request)
        node_id = node_id_of(request.name)
        try:
            await self._store.deregister(node_id, request.etag)
        except MeshError as error:
            if not (request.allow_missing and error.code is Code.NOT_FOUND):
                raise
        return pb.DeregisterNodeResponse()

    async def WatchNodes(  # noqa: N802
        self, request: pb.WatchNodesRequest, _context: object
    ) -> AsyncIterator[pb.WatchNodesResponse]:
        """Stream the nodes and their changes; quiet times are filled with bookmarks."""
        if request.model:
            check_model(request.model, "model")
        if request.start_revision < 0:
            raise invalid("start_revision", f"{request.start_revision}: expected 0 or more")
        revision = request.start_revision
        if revision == 0:
            snapshot = await self._store.snapshot()
            revision = snapshot.revision
            for node in snapshot.nodes:
                if _serves(node, request.model):
                    yield _put(node, revision)
            yield _bookmark(revision)
        events = self._store.watch(revision)
        following = asyncio.ensure_future(anext(events))
        try:
            while True:
                await asyncio.wait((following,), timeout=self._bookmark_interval_s)
                if not following.done():
                    yield _bookmark(revision)
                    continue
                event = following.result()
                following = asyncio.ensure_future(anext(events))
                revision = event.revision
                answer = _answer(event, request)
                if answer is not None:
                    yield answer
        finally:
            following.cancel()
            await asyncio.wait((following,))
            await events.aclose()

    async def _policy(self) -> types_pb2.GrantPolicy | None:
        return None if self._grants is None else await self._grants.policy()


def _answer(event: Event, request: pb.WatchNodesRequest) -> pb.WatchNodesResponse | None:
    """Give what a watch says about `event`; None if it does not concern it."""
    served_before = not request.model or request.model in event.models_before
    if event.is_load:
        is_wanted = request.include_load and _serves(event.node, request.model)
        return _put(event.node, event.revision) if is_wanted else None
    if not event.is_deleted and _serves(event.node, request.model):
        return _put(event.node, event.revision)
    if not served_before:
        return None
    return pb.WatchNodesResponse(
        type=pb.WatchNodesResponse.EVENT_TYPE_DELETE,
        node=pb.Node(name=event.node.name),
        revision=event.revision,
    )


def _put(node: pb.Node, revision: int) -> pb.WatchNodesResponse:
    return pb.WatchNodesResponse(
        type=pb.WatchNodesResponse.EVENT_TYPE_PUT, node=node, revision=revision
    )


def _bookmark(revision: int) -> pb.WatchNodesResponse:
    return pb.WatchNodesResponse(type=pb.WatchNodesResponse.EVENT_TYPE_BOOKMARK, revision=revision)


def _serves(node: pb.Node, model: str) -> bool:
    return not model or any(shard.model == model for shard in node.shards)


def _seconds(nanoseconds: int, field: str) -> float:
    if nanoseconds < 0:
        raise invalid(field, f"{nanoseconds / 1e9} s: expected no negative time")
    return nanoseconds / 1e9


def _lease(lease: Lease) -> types_pb2.Lease:
    message = types_pb2.Lease(lease_id=lease.lease_id)
    message.ttl.FromMilliseconds(int(lease.ttl_s * 1000))
    message.heartbeat_interval.FromMilliseconds(int(lease.ttl_s * 1000 / 3))
    return message
