import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from meshnet.v1 import node_service_pb2 as _node_service_pb2
from meshnet.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRecord(_message.Message):
    __slots__ = ("node", "lease_id", "address", "ttl_s", "drain_left_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    node: _node_service_pb2.Node
    lease_id: str
    address: str
    ttl_s: float
    drain_left_s: float
    def __init__(self, node: _Optional[_Union[_node_service_pb2.Node, _Mapping]] = ..., lease_id: _Optional[str] = ..., address: _Optional[str] = ..., ttl_s: _Optional[float] = ..., drain_left_s: _Optional[float] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("heartbeat_time", "load")
    HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    heartbeat_time: _timestamp_pb2.Timestamp
    load: _types_pb2.LoadStats
    def __init__(self, heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.LoadStats, _Mapping]] = ...) -> None: ...
