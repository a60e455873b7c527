import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTE_CLASS_UNSPECIFIED: _ClassVar[RouteClass]
    ROUTE_CLASS_LAN: _ClassVar[RouteClass]
    ROUTE_CLASS_RELAY: _ClassVar[RouteClass]
ROUTE_CLASS_UNSPECIFIED: RouteClass
ROUTE_CLASS_LAN: RouteClass
ROUTE_CLASS_RELAY: RouteClass

class LayerRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("model", "model_digest", "layers", "layer_count", "embedding", "lm_head")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    LM_HEAD_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    layers: LayerRange
    layer_count: int
    embedding: bool
    lm_head: bool
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., layer_count: _Optional[int] = ..., embedding: _Optional[bool] = ..., lm_head: _Optional[bool] = ...) -> None: ...

class WireProfile(_message.Message):
    __slots__ = ("versions", "encodings", "max_body_bytes")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    encodings: _containers.RepeatedScalarFieldContainer[str]
    max_body_bytes: int
    def __init__(self, versions: _Optional[_Iterable[int]] = ..., encodings: _Optional[_Iterable[str]] = ..., max_body_bytes: _Optional[int] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("region", "zone")
    REGION_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    region: str
    zone: str
    def __init__(self, region: _Optional[str] = ..., zone: _Optional[str] = ...) -> None: ...

class LoadStats(_message.Message):
    __slots__ = ("queue_depth", "active_sessions", "kv_cache_capacity_tokens", "kv_cache_used_tokens", "observe_time", "layer_microseconds", "links")
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAYER_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    queue_depth: int
    active_sessions: int
    kv_cache_capacity_tokens: int
    kv_cache_used_tokens: int
    observe_time: _timestamp_pb2.Timestamp
    layer_microseconds: int
    links: _containers.RepeatedCompositeFieldContainer[LinkStats]
    def __init__(self, queue_depth: _Optional[int] = ..., active_sessions: _Optional[int] = ..., kv_cache_capacity_tokens: _Optional[int] = ..., kv_cache_used_tokens: _Optional[int] = ..., observe_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., layer_microseconds: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkStats, _Mapping]]] = ...) -> None: ...

class LinkStats(_message.Message):
    __slots__ = ("node", "round_trip_microseconds", "bytes_per_second")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    node: str
    round_trip_microseconds: int
    bytes_per_second: int
    def __init__(self, node: _Optional[str] = ..., round_trip_microseconds: _Optional[int] = ..., bytes_per_second: _Optional[int] = ...) -> None: ...

class GrantKey(_message.Message):
    __slots__ = ("key_id", "public_key", "expire_time")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    public_key: bytes
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, key_id: _Optional[str] = ..., public_key: _Optional[bytes] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RemovedKey(_message.Message):
    __slots__ = ("key_sha256", "expire_time")
    KEY_SHA256_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    key_sha256: bytes
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, key_sha256: _Optional[bytes] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GrantPolicy(_message.Message):
    __slots__ = ("required", "keys", "time", "removed_keys")
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    required: bool
    keys: _containers.RepeatedCompositeFieldContainer[GrantKey]
    time: _timestamp_pb2.Timestamp
    removed_keys: _containers.RepeatedCompositeFieldContainer[RemovedKey]
    def __init__(self, required: _Optional[bool] = ..., keys: _Optional[_Iterable[_Union[GrantKey, _Mapping]]] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., removed_keys: _Optional[_Iterable[_Union[RemovedKey, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "ttl", "heartbeat_interval")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ttl: _duration_pb2.Duration
    heartbeat_interval: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
