import datetime

from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from meshnet.v1 import enrollment_service_pb2 as _enrollment_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operator(_message.Message):
    __slots__ = ("name", "role", "create_time", "revoked")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _enrollment_service_pb2.Role
    create_time: _timestamp_pb2.Timestamp
    revoked: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_enrollment_service_pb2.Role, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoked: _Optional[bool] = ...) -> None: ...

class CreateOperatorRequest(_message.Message):
    __slots__ = ("operator",)
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    operator: Operator
    def __init__(self, operator: _Optional[_Union[Operator, _Mapping]] = ...) -> None: ...

class CreateOperatorResponse(_message.Message):
    __slots__ = ("operator", "token")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    operator: Operator
    token: str
    def __init__(self, operator: _Optional[_Union[Operator, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class ListOperatorsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListOperatorsResponse(_message.Message):
    __slots__ = ("operators", "next_page_token")
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    operators: _containers.RepeatedCompositeFieldContainer[Operator]
    next_page_token: str
    def __init__(self, operators: _Optional[_Iterable[_Union[Operator, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RevokeOperatorRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RevokeOperatorResponse(_message.Message):
    __slots__ = ("operator",)
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    operator: Operator
    def __init__(self, operator: _Optional[_Union[Operator, _Mapping]] = ...) -> None: ...
