"""Checks of requests: what the schema marks REQUIRED, and what it cannot say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from google.api import field_behavior_pb2  # type: ignore[import-untyped]
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from meshnet.errors import Code, MeshError
from meshnet.topology import NodeId, parse_node_id
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import types_pb2

__all__ = [
    "check_labels",
    "check_load",
    "check_model",
    "check_node",
    "check_node_id",
    "check_required",
    "check_weight",
    "endpoint_address",
    "endpoint_is_tls",
    "invalid",
    "node_id_of",
]

MAX_LAYERS: Final = 10_000
MAX_SHARDS: Final = 64
MAX_ENDPOINTS: Final = 16
MAX_LABELS: Final = 64
MAX_LINKS: Final = 64
MAX_WEIGHT: Final = 10_000
_MAX_TEXT: Final = 256
_MAX_MESSAGE: Final = 1500
_URI = re.compile(
    r"http(?P<tls>s?)://(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:(?P<port>[0-9]{1,5}))?/forward"
)
_REQUIRED = field_behavior_pb2.FieldBehavior.Value("REQUIRED")


def invalid(field: str, message: str) -> MeshError:
    """Give the error for a field with a value that cannot be used."""
    # Unprintable characters, which are quoted in ten, are cut once more.
    return MeshError(
        Code.INVALID_ARGUMENT, f"{field[:_MAX_TEXT]}: {message}"[:_MAX_MESSAGE], field=field
    )


def check_required(message: Message, prefix: str = "") -> None:
    """Check that each field marked REQUIRED is set, in nested messages too.

    Raises:
        MeshError: INVALID_ARGUMENT, for the first one that is not.
    """
    for field in message.DESCRIPTOR.fields:
        path = f"{prefix}{field.name}"
        value = getattr(message, field.name)
        is_set = message.HasField(field.name) if field.has_presence else bool(value)
        behaviors = field.GetOptions().Extensions[field_behavior_pb2.field_behavior]
        if _REQUIRED in behaviors and not is_set:
            raise invalid(path, "required, but not set")
        if field.type != FieldDescriptor.TYPE_MESSAGE or not is_set:
            continue
        if not field.is_repeated:
            check_required(value, f"{path}.")
        elif field.message_type is None or not field.message_type.GetOptions().map_entry:
            for index, item in enumerate(value):
                check_required(item, f"{path}[{index}].")


def node_id_of(name: str, field: str = "name") -> NodeId:
    """Read the resource name ``nodes/{id}``.

    Raises:
        MeshError: INVALID_ARGUMENT, not such a name.
    """
    prefix, slash, node_id = name.partition("/")
    if prefix != "nodes" or not slash:
        raise invalid(field, f"{name[:_MAX_TEXT]!r} is not a node's name: expected nodes/ID")
    return check_node_id(node_id, field)


def check_node_id(text: str, field: str = "node_id") -> NodeId:
    """Check a node id.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    try:
        return parse_node_id(text)
    except ValueError as error:
        raise invalid(field, str(error)[:1000]) from None


def check_model(name: str, field: str) -> None:
    """Check the resource name ``models/{model}``; the id may contain slashes.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    prefix, *segments = name.split("/")
    good = prefix == "models" and segments and all(s not in ("", ".", "..") for s in segments)
    if not good or len(name) > _MAX_TEXT or not name.isprintable():
        raise invalid(
            field,
            f"{name[:_MAX_TEXT]!r} is not a model's name: expected models/ID of at most "
            f"{_MAX_TEXT} printable characters, with no empty segment",
        )


def endpoint_address(uri: str, field: str) -> str:
    """Read ``host:port`` of an activation-plane URI, ``http[s]://HOST[:PORT]/forward``.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    match = _URI.fullmatch(uri)
    port = int(match["port"] or (443 if match["tls"] else 80)) if match else 0
    if match is None or not 0 < port < 65536:
        raise invalid(
            field,
            f"{uri[:_MAX_TEXT]!r}: expected http://HOST:PORT/forward, or https with TLS",
        )
    return f"{match['host']}:{port}"


def endpoint_is_tls(uri: str) -> bool:
    """Tell whether an activation-plane URI is one of TLS."""
    return uri.startswith("https:")


def check_labels(labels: Iterable[tuple[str, str]], field: str) -> None:
    """Check the number and size of labels.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    pairs = list(labels)
    if len(pairs) > MAX_LABELS:
        raise invalid(field, f"{len(pairs)} labels: expected at most {MAX_LABELS}")
    for key, value in pairs:
        if not key or len(key) > _MAX_TEXT or len(value) > _MAX_TEXT:
            raise invalid(field, f"label {key[:_MAX_TEXT]!r}: expected 1 to {_MAX_TEXT} characters")


def check_load(load: types_pb2.LoadStats, field: str) -> None:
    """Check what a node reports.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    if len(load.links) > MAX_LINKS:
        raise invalid(f"{field}.links", f"{len(load.links)} links: expected at most {MAX_LINKS}")
    for index, link in enumerate(load.links):
        node_id_of(link.node, f"{field}.links[{index}].node")


def check_weight(weight: int, field: str) -> None:
    """Check a traffic weight; 0 stands for the default.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    if weight > MAX_WEIGHT:
        raise invalid(field, f"{weight}: expected at most {MAX_WEIGHT}")


def check_node(node: node_pb.Node) -> str:
    """Check what a node registers with; gives ``host:port`` of its first endpoint.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field.
    """
    for name, limit in (("shards", MAX_SHARDS), ("endpoints", MAX_ENDPOINTS)):
        if len(getattr(node, name)) > limit:
            raise invalid(f"node.{name}", f"expected at most {limit}")
    addresses = [
        endpoint_address(endpoint.uri, f"node.endpoints[{index}].uri")
        for index, endpoint in enumerate(node.endpoints)
    ]
    seen: set[str] = set()
    for index, shard in enumerate(node.shards):
        field = f"node.shards[{index}]"
        _check_shard(shard, field)
        if shard.model in seen:
            raise invalid(f"{field}.model", f"{shard.model!r} has a shard on this node already")
        seen.add(shard.model)
    check_labels(node.labels.items(), "node.labels")
    check_weight(node.weight, "node.weight")
    return addresses[0]


def _check_shard(shard: types_pb2.Shard, field: str) -> None:
    check_model(shard.model, f"{field}.model")
    if len(shard.model_digest) > _MAX_TEXT:
        raise invalid(f"{field}.model_digest", f"expected at most {_MAX_TEXT} characters")
    start, end, count = shard.layers.start, shard.layers.end, shard.layer_count
    if count > MAX_LAYERS:
        raise invalid(f"{field}.layer_count", f"{count}: expected at most {MAX_LAYERS}")
    if not start < end <= count:
        raise invalid(
            f"{field}.layers", f"{start}-{end}: expected start < end <= layer_count, {count}"
        )
    if shard.embedding and start != 0:
        raise invalid(f"{field}.embedding", f"layers {start}-{end} do not begin with layer 0")
    if shard.lm_head and end != count:
        raise invalid(f"{field}.lm_head", f"layers {start}-{end} do not end with layer {count}")
