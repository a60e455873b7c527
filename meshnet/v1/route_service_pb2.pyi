import datetime

from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from meshnet.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hop(_message.Message):
    __slots__ = ("node", "incarnation", "layers", "endpoint", "encodings", "cost")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: int
    layers: _types_pb2.LayerRange
    endpoint: _types_pb2.Endpoint
    encodings: _containers.RepeatedScalarFieldContainer[str]
    cost: HopCost
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[int] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ..., endpoint: _Optional[_Union[_types_pb2.Endpoint, _Mapping]] = ..., encodings: _Optional[_Iterable[str]] = ..., cost: _Optional[_Union[HopCost, _Mapping]] = ...) -> None: ...

class HopCost(_message.Message):
    __slots__ = ("compute", "queue", "cache", "link", "overhead", "penalty", "link_measured")
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    PENALTY_FIELD_NUMBER: _ClassVar[int]
    LINK_MEASURED_FIELD_NUMBER: _ClassVar[int]
    compute: int
    queue: int
    cache: int
    link: int
    overhead: int
    penalty: int
    link_measured: bool
    def __init__(self, compute: _Optional[int] = ..., queue: _Optional[int] = ..., cache: _Optional[int] = ..., link: _Optional[int] = ..., overhead: _Optional[int] = ..., penalty: _Optional[int] = ..., link_measured: _Optional[bool] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("route_id", "model", "model_digest", "hops", "wire_version", "cost", "route_class", "grant", "grant_ttl")
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    ROUTE_CLASS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    GRANT_TTL_FIELD_NUMBER: _ClassVar[int]
    route_id: str
    model: str
    model_digest: str
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    wire_version: int
    cost: int
    route_class: _types_pb2.RouteClass
    grant: str
    grant_ttl: _duration_pb2.Duration
    def __init__(self, route_id: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., wire_version: _Optional[int] = ..., cost: _Optional[int] = ..., route_class: _Optional[_Union[_types_pb2.RouteClass, str]] = ..., grant: _Optional[str] = ..., grant_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "digest", "layer_count", "ready_replicas", "uncovered")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    READY_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    UNCOVERED_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    layer_count: int
    ready_replicas: _containers.RepeatedScalarFieldContainer[int]
    uncovered: _containers.RepeatedCompositeFieldContainer[_types_pb2.LayerRange]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., layer_count: _Optional[int] = ..., ready_replicas: _Optional[_Iterable[int]] = ..., uncovered: _Optional[_Iterable[_Union[_types_pb2.LayerRange, _Mapping]]] = ...) -> None: ...

class SelectRouteRequest(_message.Message):
    __slots__ = ("model", "model_digest", "exclude_nodes", "prefer_nodes", "region", "wire_versions", "expected_tokens", "max_routes", "route_class", "encodings", "explain", "session_id", "prefer_borders")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_NODES_FIELD_NUMBER: _ClassVar[int]
    PREFER_NODES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUTES_FIELD_NUMBER: _ClassVar[int]
    ROUTE_CLASS_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFER_BORDERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    exclude_nodes: _containers.RepeatedScalarFieldContainer[str]
    prefer_nodes: _containers.RepeatedScalarFieldContainer[str]
    region: str
    wire_versions: _containers.RepeatedScalarFieldContainer[int]
    expected_tokens: int
    max_routes: int
    route_class: _types_pb2.RouteClass
    encodings: _containers.RepeatedScalarFieldContainer[str]
    explain: bool
    session_id: str
    prefer_borders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., exclude_nodes: _Optional[_Iterable[str]] = ..., prefer_nodes: _Optional[_Iterable[str]] = ..., region: _Optional[str] = ..., wire_versions: _Optional[_Iterable[int]] = ..., expected_tokens: _Optional[int] = ..., max_routes: _Optional[int] = ..., route_class: _Optional[_Union[_types_pb2.RouteClass, str]] = ..., encodings: _Optional[_Iterable[str]] = ..., explain: _Optional[bool] = ..., session_id: _Optional[str] = ..., prefer_borders: _Optional[_Iterable[int]] = ...) -> None: ...

class LeftOutNode(_message.Message):
    __slots__ = ("node", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SelectRouteResponse(_message.Message):
    __slots__ = ("routes", "revision", "left_out")
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    revision: int
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutNode]
    def __init__(self, routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., revision: _Optional[int] = ..., left_out: _Optional[_Iterable[_Union[LeftOutNode, _Mapping]]] = ...) -> None: ...

class GrantRouteRequest(_message.Message):
    __slots__ = ("session_id", "model", "hops")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ...) -> None: ...

class GrantRouteResponse(_message.Message):
    __slots__ = ("grant", "grant_ttl")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    GRANT_TTL_FIELD_NUMBER: _ClassVar[int]
    grant: str
    grant_ttl: _duration_pb2.Duration
    def __init__(self, grant: _Optional[str] = ..., grant_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetGrantPolicyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class GetGrantPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _types_pb2.GrantPolicy
    def __init__(self, policy: _Optional[_Union[_types_pb2.GrantPolicy, _Mapping]] = ...) -> None: ...

class WatchRoutesRequest(_message.Message):
    __slots__ = ("model", "region", "max_routes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    region: str
    max_routes: int
    def __init__(self, model: _Optional[str] = ..., region: _Optional[str] = ..., max_routes: _Optional[int] = ...) -> None: ...

class WatchRoutesResponse(_message.Message):
    __slots__ = ("routes", "revision")
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    revision: int
    def __init__(self, routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("serving", "replica_id", "store_connected", "revision", "node_counts", "uncovered_models", "software_version", "store_age")
    class NodeCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    UNCOVERED_MODELS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_AGE_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    replica_id: str
    store_connected: bool
    revision: int
    node_counts: _containers.ScalarMap[str, int]
    uncovered_models: _containers.RepeatedScalarFieldContainer[str]
    software_version: str
    store_age: _duration_pb2.Duration
    def __init__(self, serving: _Optional[bool] = ..., replica_id: _Optional[str] = ..., store_connected: _Optional[bool] = ..., revision: _Optional[int] = ..., node_counts: _Optional[_Mapping[str, int]] = ..., uncovered_models: _Optional[_Iterable[str]] = ..., software_version: _Optional[str] = ..., store_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
