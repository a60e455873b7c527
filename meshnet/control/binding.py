"""Request messages from the parts of an HTTP request: body, path, query (pure).

Field names are accepted in both spellings, proto's and JSON's.
Source: google/api/http.proto; ProtoJSON (protobuf.dev/programming-guides/json).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from meshnet.control.jsonshape import INTEGER, INTEGER_RANGES, check_shape, field_named
from meshnet.control.template import percent_decode
from meshnet.control.validate import invalid
from meshnet.errors import MeshError
from meshnet.jsontext import check_nesting

__all__ = ["bind_body", "bind_path", "bind_query", "check_path_field", "mask_of", "parse_json"]

_FLOATS: Final = frozenset({FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE})
_FIELD_MASK: Final = "google.protobuf.FieldMask"
_TEXT_MESSAGES: Final = frozenset({"google.protobuf.Timestamp", "google.protobuf.Duration"})
_WRAPPER = re.compile(r"google\.protobuf\.(Double|Float|U?Int32|U?Int64|Bool|String|Bytes)Value")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IN_FIELD = re.compile(r"Failed to parse (\S+) field: ")
_MASK_PATH = re.compile(r"\*|[a-z][a-z0-9]*([_.][a-z][a-z0-9]*)*")
"""What ProtoJSON can write: a field name's parts begin with letters."""
_MAX_SHOWN: Final = 200


def parse_json(text: bytes, field: str) -> Any:
    """Read JSON, refusing duplicate keys and the constants that JSON does not have.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    try:
        check_nesting(text)
    except ValueError as error:
        raise invalid(field, f"the body: {error}") from None
    try:
        decoded = text.decode()
        return json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    except MeshError:
        raise
    except UnicodeDecodeError:
        raise invalid(field, "the body is not UTF-8") from None
    except ValueError as error:
        raise invalid(field, f"the body is not JSON: {error}") from None


def bind_body(message: Message, value: Any, body: str) -> None:
    """Set the field named `body`, or the whole of `message` for ``*``, from parsed JSON.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field at fault.
    """
    if body != "*":
        value = {body: value}
    try:
        check_shape(value, _descriptor(message))
        json_format.ParseDict(value, message)
    except RecursionError:
        raise invalid("body", "nested too deeply") from None
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        raise _from_parse_error(error, message.DESCRIPTOR.name, body) from None


def bind_path(message: Message, values: Mapping[str, str]) -> None:
    """Set the fields that the path's variables name.

    Raises:
        MeshError: INVALID_ARGUMENT, not a value of the field, or the body has another.
    """
    for path, text in values.items():
        *parents, name = path.split(".")
        holder = message
        for parent in parents:
            holder = getattr(holder, parent)
        field = _descriptor(holder).fields_by_name[name]
        fresh = type(holder)()
        _set(fresh, field, text, path)
        value = getattr(fresh, name)
        if _is_set(holder, field) and getattr(holder, name) != value:
            raise invalid(path, f"the path says {text[:_MAX_SHOWN]!r}, the body another value")
        holder.MergeFrom(fresh)


def bind_query(message: Message, query: str, *, body: str, bound: set[str]) -> None:
    """Set fields from a raw query string.

    Args:
        message: changed in place.
        query: still encoded; ``+`` is a space.
        body: the field that the body is bound to, ``*`` or empty.
        bound: paths that the path's variables have set.

    Raises:
        MeshError: INVALID_ARGUMENT, a parameter that is malformed, unknown, repeated,
            bound elsewhere, or of a kind that a query cannot carry.
    """
    seen: set[str] = set()
    for piece in query.split("&") if query else ():
        raw_key, _, raw_value = piece.partition("=")
        key = percent_decode(raw_key.replace("+", " "), "query")
        text = percent_decode(raw_value.replace("+", " "), key[:_MAX_SHOWN])
        shown = key[:_MAX_SHOWN]
        holder, field, path = _resolve(message, key)
        if body == "*":
            raise invalid(shown, "expected in the body, not in the query")
        if body and (path == body or path.startswith(f"{body}.")):
            raise invalid(shown, f"belongs to {body!r}, which the body carries")
        if path in bound:
            raise invalid(shown, "set by the path already")
        if path in seen and not field.is_repeated:
            raise invalid(shown, "given twice")
        group = field.containing_oneof
        if group is not None and path not in seen:
            other = holder.WhichOneof(group.name)
            if other is not None:
                raise invalid(shown, f"only one of {other!r} and {field.name!r} can be set")
        seen.add(path)
        _set(holder, field, text, shown)


def check_path_field(descriptor: Descriptor, path: str) -> None:
    """Check that a path variable names a field that a path can set.

    Raises:
        ValueError: it does not.
    """
    *parents, name = path.split(".")
    for parent in parents:
        field = descriptor.fields_by_name.get(parent)
        if field is None or field.message_type is None or field.is_repeated:
            raise ValueError(f"{descriptor.full_name} has no singular message {parent!r}")
        descriptor = field.message_type
    field = descriptor.fields_by_name.get(name)
    if field is None or field.is_repeated or not _is_text_like(field):
        raise ValueError(f"{descriptor.full_name}.{name} cannot be set by a path")


def mask_of(value: Any, descriptor: Descriptor, skip: set[str], prefix: str = "") -> list[str]:
    """Name the fields present in a body, as a field mask: sorted, without those in `skip`."""
    paths = []
    for key, item in value.items() if isinstance(value, dict) else ():
        field = field_named(descriptor, key)
        if field is None or f"{prefix}{field.name}" in skip:
            continue
        path = f"{prefix}{field.name}"
        inner = field.message_type
        is_plain = inner is not None and not field.is_repeated and not _is_text_like(field)
        nested = (
            mask_of(item, inner, skip, f"{path}.")
            if is_plain and inner is not None and isinstance(item, dict) and _is_own(inner)
            else []
        )
        paths += nested or [path]
    return sorted(paths)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise invalid(key[:_MAX_SHOWN], "the body has this key twice")
        values[key] = value
    return values


def _no_constant(name: str) -> Any:
    raise invalid("body", f"{name} is not JSON")


def _resolve(message: Message, key: str) -> tuple[Message, FieldDescriptor, str]:
    """Find the field that a dotted key names; gives its holder too, and the path in proto names."""
    shown = key[:_MAX_SHOWN]
    holder = message
    names: list[str] = []
    *parents, last = key.split(".")
    for part in parents:
        field = field_named(_descriptor(holder), part)
        if field is None:
            raise invalid(shown, f"unknown parameter: {holder.DESCRIPTOR.name} has no {part!r}")
        if field.message_type is None or field.is_repeated or not _is_own(field.message_type):
            raise invalid(shown, f"{part!r} has no fields that a query can set")
        names.append(field.name)
        holder = getattr(holder, field.name)
    field = field_named(_descriptor(holder), last)
    if field is None:
        raise invalid(shown, f"unknown parameter: {holder.DESCRIPTOR.name} has no {last!r}")
    if not _is_text_like(field):
        raise invalid(shown, "a message or map, which a query cannot carry")
    return holder, field, ".".join([*names, field.name])


def _is_own(descriptor: Descriptor) -> bool:
    """Tell ordinary messages from those which ProtoJSON treats specially."""
    return not descriptor.full_name.startswith("google.protobuf.")


def _is_text_like(field: FieldDescriptor) -> bool:
    """Tell whether one string can carry the field (or one of its values, if repeated)."""
    inner = field.message_type
    if inner is None:
        return True
    name = inner.full_name
    return name in _TEXT_MESSAGES or name == _FIELD_MASK or _WRAPPER.fullmatch(name) is not None


def _is_set(message: Message, field: FieldDescriptor) -> bool:
    if field.has_presence:
        return message.HasField(field.name)
    return bool(getattr(message, field.name) != field.default_value)


def _set(holder: Message, field: FieldDescriptor, text: str, shown: str) -> None:
    """Set `field`, or append to it if repeated, from text."""
    inner = field.message_type
    if inner is not None and inner.full_name == _FIELD_MASK:
        masks = getattr(holder, field.name)
        mask = masks.add() if field.is_repeated else masks
        paths = [_snake_case(path) for path in text.split(",") if path]
        for path in paths:
            if _MASK_PATH.fullmatch(path) is None:
                raise invalid(shown, f"{path[:_MAX_SHOWN]!r}: expected the path of a field")
        mask.paths.extend(paths)
        mask.SetInParent()
        return
    scalar = field
    if inner is not None and _WRAPPER.fullmatch(inner.full_name):
        scalar = inner.fields_by_name["value"]
    value = text if scalar.message_type is not None else _json_value(scalar, text, shown)
    fresh = type(holder)()
    try:
        json_format.ParseDict({field.name: [value] if field.is_repeated else value}, fresh)
    except (json_format.ParseError, ValueError) as error:
        raise invalid(shown, f"{text[:_MAX_SHOWN]!r}: {_tail(error)}") from None
    holder.MergeFrom(fresh)


def _json_value(field: FieldDescriptor, text: str, shown: str) -> Any:
    """Give the JSON value of a scalar field's text."""
    kind = field.cpp_type
    bad = f"{text[:_MAX_SHOWN]!r}: expected"
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if text not in ("true", "false"):
            raise invalid(shown, f"{bad} true or false")
        return text == "true"
    if kind in INTEGER_RANGES:
        if INTEGER.fullmatch(text) is None:
            raise invalid(shown, f"{bad} a decimal integer")
        return int(text)
    if kind in _FLOATS:
        if _NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
            raise invalid(shown, f"{bad} a finite number")
        return float(text)
    if kind == FieldDescriptor.CPPTYPE_ENUM and field.enum_type is not None:
        names, numbers = field.enum_type.values_by_name, field.enum_type.values_by_number
        is_number = INTEGER.fullmatch(text) is not None
        if text not in names and not (is_number and int(text) in numbers):
            raise invalid(shown, f"{bad} one of {', '.join(names)}")
        return int(text) if is_number else text
    return text


def _snake_case(path: str) -> str:
    return re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", path)


def _from_parse_error(error: Exception, root: str, body: str) -> MeshError:
    """Name the field that json_format's error is about, as far as its text tells."""
    text = _tail(error)
    parents = _IN_FIELD.findall(text)
    at = re.search(rf" at {root}\.([\w.\[\]]+?)\.*$", text)
    field = at[1] if at is not None else ".".join(parents) or body.replace("*", "body")
    return invalid(field, _IN_FIELD.sub("", text[: at.start()] if at is not None else text))


def _descriptor(message: Message) -> Descriptor:
    return message.DESCRIPTOR  # type: ignore[return-value]  # the stubs name two classes for one


def _tail(error: Exception) -> str:
    return str(error).splitlines()[0][:500] if str(error) else type(error).__name__
