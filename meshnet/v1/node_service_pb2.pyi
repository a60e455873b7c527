import datetime

from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.api import resource_pb2 as _resource_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from meshnet.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_JOINING: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_DRAINED: _ClassVar[NodeState]
    NODE_STATE_LOST: _ClassVar[NodeState]
    NODE_STATE_CORDONED: _ClassVar[NodeState]
    NODE_STATE_QUARANTINED: _ClassVar[NodeState]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_JOINING: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_DRAINED: NodeState
NODE_STATE_LOST: NodeState
NODE_STATE_CORDONED: NodeState
NODE_STATE_QUARANTINED: NodeState

class Node(_message.Message):
    __slots__ = ("name", "incarnation", "shards", "endpoints", "wire", "location", "labels", "weight", "cordoned", "software_version", "state", "load", "create_time", "heartbeat_time", "etag", "drain_reason", "verification")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.Shard]
    endpoints: _containers.RepeatedCompositeFieldContainer[_types_pb2.Endpoint]
    wire: _types_pb2.WireProfile
    location: _types_pb2.Location
    labels: _containers.ScalarMap[str, str]
    weight: int
    cordoned: bool
    software_version: str
    state: NodeState
    load: _types_pb2.LoadStats
    create_time: _timestamp_pb2.Timestamp
    heartbeat_time: _timestamp_pb2.Timestamp
    etag: str
    drain_reason: str
    verification: Verification
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.Shard, _Mapping]]] = ..., endpoints: _Optional[_Iterable[_Union[_types_pb2.Endpoint, _Mapping]]] = ..., wire: _Optional[_Union[_types_pb2.WireProfile, _Mapping]] = ..., location: _Optional[_Union[_types_pb2.Location, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., weight: _Optional[int] = ..., cordoned: _Optional[bool] = ..., software_version: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., load: _Optional[_Union[_types_pb2.LoadStats, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., etag: _Optional[str] = ..., drain_reason: _Optional[str] = ..., verification: _Optional[_Union[Verification, _Mapping]] = ...) -> None: ...

class Verification(_message.Message):
    __slots__ = ("state", "reason", "message", "since_time")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Verification.State]
        STATE_UNVERIFIED: _ClassVar[Verification.State]
        STATE_PENDING: _ClassVar[Verification.State]
        STATE_VERIFIED: _ClassVar[Verification.State]
        STATE_FAILED: _ClassVar[Verification.State]
    STATE_UNSPECIFIED: Verification.State
    STATE_UNVERIFIED: Verification.State
    STATE_PENDING: Verification.State
    STATE_VERIFIED: Verification.State
    STATE_FAILED: Verification.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_TIME_FIELD_NUMBER: _ClassVar[int]
    state: Verification.State
    reason: str
    message: str
    since_time: _timestamp_pb2.Timestamp
    def __init__(self, state: _Optional[_Union[Verification.State, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., since_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RegisterNodeRequest(_message.Message):
    __slots__ = ("node", "node_id", "requested_ttl")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_TTL_FIELD_NUMBER: _ClassVar[int]
    node: Node
    node_id: str
    requested_ttl: _duration_pb2.Duration
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., node_id: _Optional[str] = ..., requested_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RegisterNodeResponse(_message.Message):
    __slots__ = ("node", "lease", "revision", "grants")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    node: Node
    lease: _types_pb2.Lease
    revision: int
    grants: _types_pb2.GrantPolicy
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., revision: _Optional[int] = ..., grants: _Optional[_Union[_types_pb2.GrantPolicy, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("name", "lease_id", "incarnation", "load", "ready", "probes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    incarnation: int
    load: _types_pb2.LoadStats
    ready: bool
    probes: _containers.RepeatedCompositeFieldContainer[ProbeReport]
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., load: _Optional[_Union[_types_pb2.LoadStats, _Mapping]] = ..., ready: _Optional[bool] = ..., probes: _Optional[_Iterable[_Union[ProbeReport, _Mapping]]] = ...) -> None: ...

class ProbeReport(_message.Message):
    __slots__ = ("model", "probe_version", "dtype", "parts", "problem")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROBE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    model: str
    probe_version: int
    dtype: str
    parts: _containers.RepeatedCompositeFieldContainer[ProbePart]
    problem: str
    def __init__(self, model: _Optional[str] = ..., probe_version: _Optional[int] = ..., dtype: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ProbePart, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class ProbePart(_message.Message):
    __slots__ = ("name", "digest", "sketch", "against")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    AGAINST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    sketch: _containers.RepeatedScalarFieldContainer[float]
    against: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., sketch: _Optional[_Iterable[float]] = ..., against: _Optional[_Iterable[float]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("lease", "desired_state", "revision", "drain_remaining", "grants", "verification", "probes_wanted")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DESIRED_STATE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REMAINING_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    PROBES_WANTED_FIELD_NUMBER: _ClassVar[int]
    lease: _types_pb2.Lease
    desired_state: NodeState
    revision: int
    drain_remaining: _duration_pb2.Duration
    grants: _types_pb2.GrantPolicy
    verification: Verification
    probes_wanted: bool
    def __init__(self, lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., desired_state: _Optional[_Union[NodeState, str]] = ..., revision: _Optional[int] = ..., drain_remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., grants: _Optional[_Union[_types_pb2.GrantPolicy, _Mapping]] = ..., verification: _Optional[_Union[Verification, _Mapping]] = ..., probes_wanted: _Optional[bool] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "states", "model", "region")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    states: _containers.RepeatedScalarFieldContainer[NodeState]
    model: str
    region: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., states: _Optional[_Iterable[_Union[NodeState, str]]] = ..., model: _Optional[str] = ..., region: _Optional[str] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes", "next_page_token", "revision")
    NODES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    next_page_token: str
    revision: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class UpdateNodeRequest(_message.Message):
    __slots__ = ("node", "update_mask")
    NODE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    node: Node
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class UpdateNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("name", "grace_period", "reason", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRACE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    grace_period: _duration_pb2.Duration
    reason: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., grace_period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reason: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class DeregisterNodeRequest(_message.Message):
    __slots__ = ("name", "etag", "allow_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    allow_missing: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., allow_missing: _Optional[bool] = ...) -> None: ...

class DeregisterNodeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchNodesRequest(_message.Message):
    __slots__ = ("start_revision", "model", "include_load")
    START_REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_LOAD_FIELD_NUMBER: _ClassVar[int]
    start_revision: int
    model: str
    include_load: bool
    def __init__(self, start_revision: _Optional[int] = ..., model: _Optional[str] = ..., include_load: _Optional[bool] = ...) -> None: ...

class WatchNodesResponse(_message.Message):
    __slots__ = ("type", "node", "revision")
    class EventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EVENT_TYPE_UNSPECIFIED: _ClassVar[WatchNodesResponse.EventType]
        EVENT_TYPE_PUT: _ClassVar[WatchNodesResponse.EventType]
        EVENT_TYPE_DELETE: _ClassVar[WatchNodesResponse.EventType]
        EVENT_TYPE_BOOKMARK: _ClassVar[WatchNodesResponse.EventType]
    EVENT_TYPE_UNSPECIFIED: WatchNodesResponse.EventType
    EVENT_TYPE_PUT: WatchNodesResponse.EventType
    EVENT_TYPE_DELETE: WatchNodesResponse.EventType
    EVENT_TYPE_BOOKMARK: WatchNodesResponse.EventType
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    type: WatchNodesResponse.EventType
    node: Node
    revision: int
    def __init__(self, type: _Optional[_Union[WatchNodesResponse.EventType, str]] = ..., node: _Optional[_Union[Node, _Mapping]] = ..., revision: _Optional[int] = ...) -> None: ...
