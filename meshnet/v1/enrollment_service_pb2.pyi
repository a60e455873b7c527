import datetime

from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.api import resource_pb2 as _resource_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from meshnet.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_NODE: _ClassVar[Role]
    ROLE_GATEWAY: _ClassVar[Role]
    ROLE_READ: _ClassVar[Role]
    ROLE_OPERATE: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_NODE: Role
ROLE_GATEWAY: Role
ROLE_READ: Role
ROLE_OPERATE: Role
ROLE_ADMIN: Role

class JoinToken(_message.Message):
    __slots__ = ("name", "role", "name_pattern", "max_uses", "used", "ttl", "expire_time", "model", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_PATTERN_FIELD_NUMBER: _ClassVar[int]
    MAX_USES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    name_pattern: str
    max_uses: int
    used: int
    ttl: _duration_pb2.Duration
    expire_time: _timestamp_pb2.Timestamp
    model: str
    layers: _types_pb2.LayerRange
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., name_pattern: _Optional[str] = ..., max_uses: _Optional[int] = ..., used: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., model: _Optional[str] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "role", "key_sha256", "join_token", "create_time", "expire_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KEY_SHA256_FIELD_NUMBER: _ClassVar[int]
    JOIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    key_sha256: str
    join_token: str
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., key_sha256: _Optional[str] = ..., join_token: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class EnrollRequest(_message.Message):
    __slots__ = ("join_token", "member_name", "csr_pem", "role")
    JOIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_NAME_FIELD_NUMBER: _ClassVar[int]
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    join_token: str
    member_name: str
    csr_pem: str
    role: Role
    def __init__(self, join_token: _Optional[str] = ..., member_name: _Optional[str] = ..., csr_pem: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class EnrollResponse(_message.Message):
    __slots__ = ("certificate_chain_pem", "trust_bundle_pem", "renew_time", "role", "model", "layers", "grpc_addresses")
    CERTIFICATE_CHAIN_PEM_FIELD_NUMBER: _ClassVar[int]
    TRUST_BUNDLE_PEM_FIELD_NUMBER: _ClassVar[int]
    RENEW_TIME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    certificate_chain_pem: str
    trust_bundle_pem: str
    renew_time: _timestamp_pb2.Timestamp
    role: Role
    model: str
    layers: _types_pb2.LayerRange
    grpc_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, certificate_chain_pem: _Optional[str] = ..., trust_bundle_pem: _Optional[str] = ..., renew_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ..., grpc_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewCertificateRequest(_message.Message):
    __slots__ = ("csr_pem",)
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    csr_pem: str
    def __init__(self, csr_pem: _Optional[str] = ...) -> None: ...

class RenewCertificateResponse(_message.Message):
    __slots__ = ("certificate_chain_pem", "trust_bundle_pem", "renew_time")
    CERTIFICATE_CHAIN_PEM_FIELD_NUMBER: _ClassVar[int]
    TRUST_BUNDLE_PEM_FIELD_NUMBER: _ClassVar[int]
    RENEW_TIME_FIELD_NUMBER: _ClassVar[int]
    certificate_chain_pem: str
    trust_bundle_pem: str
    renew_time: _timestamp_pb2.Timestamp
    def __init__(self, certificate_chain_pem: _Optional[str] = ..., trust_bundle_pem: _Optional[str] = ..., renew_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetTrustBundleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrustBundleResponse(_message.Message):
    __slots__ = ("trust_bundle_pem",)
    TRUST_BUNDLE_PEM_FIELD_NUMBER: _ClassVar[int]
    trust_bundle_pem: str
    def __init__(self, trust_bundle_pem: _Optional[str] = ...) -> None: ...

class CreateJoinTokenRequest(_message.Message):
    __slots__ = ("join_token",)
    JOIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    join_token: JoinToken
    def __init__(self, join_token: _Optional[_Union[JoinToken, _Mapping]] = ...) -> None: ...

class CreateJoinTokenResponse(_message.Message):
    __slots__ = ("join_token", "token", "ca_spki_sha256", "http_addresses")
    JOIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CA_SPKI_SHA256_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    join_token: JoinToken
    token: str
    ca_spki_sha256: str
    http_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, join_token: _Optional[_Union[JoinToken, _Mapping]] = ..., token: _Optional[str] = ..., ca_spki_sha256: _Optional[str] = ..., http_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class ListJoinTokensRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListJoinTokensResponse(_message.Message):
    __slots__ = ("join_tokens", "next_page_token")
    JOIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    join_tokens: _containers.RepeatedCompositeFieldContainer[JoinToken]
    next_page_token: str
    def __init__(self, join_tokens: _Optional[_Iterable[_Union[JoinToken, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteJoinTokenRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteJoinTokenResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members", "next_page_token")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    next_page_token: str
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteMemberRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteMemberResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
