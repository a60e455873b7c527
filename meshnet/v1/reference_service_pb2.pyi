import datetime

from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reference(_message.Message):
    __slots__ = ("name", "model", "model_digest", "layer_count", "probe_version", "variants", "create_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROBE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    model_digest: str
    layer_count: int
    probe_version: int
    variants: _containers.RepeatedCompositeFieldContainer[ReferenceVariant]
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., layer_count: _Optional[int] = ..., probe_version: _Optional[int] = ..., variants: _Optional[_Iterable[_Union[ReferenceVariant, _Mapping]]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ReferenceVariant(_message.Message):
    __slots__ = ("dtype", "parts")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    parts: _containers.RepeatedCompositeFieldContainer[ReferencePart]
    def __init__(self, dtype: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ReferencePart, _Mapping]]] = ...) -> None: ...

class ReferencePart(_message.Message):
    __slots__ = ("name", "digest", "sketch", "scale", "noise", "rounding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    sketch: _containers.RepeatedScalarFieldContainer[float]
    scale: float
    noise: float
    rounding: float
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., sketch: _Optional[_Iterable[float]] = ..., scale: _Optional[float] = ..., noise: _Optional[float] = ..., rounding: _Optional[float] = ...) -> None: ...

class PutReferenceRequest(_message.Message):
    __slots__ = ("reference", "replace")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    reference: Reference
    replace: bool
    def __init__(self, reference: _Optional[_Union[Reference, _Mapping]] = ..., replace: _Optional[bool] = ...) -> None: ...

class PutReferenceResponse(_message.Message):
    __slots__ = ("reference",)
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    reference: Reference
    def __init__(self, reference: _Optional[_Union[Reference, _Mapping]] = ...) -> None: ...

class ListReferencesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListReferencesResponse(_message.Message):
    __slots__ = ("references", "next_page_token")
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    references: _containers.RepeatedCompositeFieldContainer[Reference]
    next_page_token: str
    def __init__(self, references: _Optional[_Iterable[_Union[Reference, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteReferenceRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteReferenceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
