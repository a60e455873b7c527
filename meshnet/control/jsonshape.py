"""Whether parsed JSON has the shape of a message: every fault named by its field path (pure).

Stricter than json_format, which lets two spellings of one field pass, reads ``"1_0"`` as
a number, and answers for a wrong type with Python's own words.
Source: ProtoJSON (protobuf.dev/programming-guides/json).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from meshnet.control.validate import invalid

__all__ = ["INTEGER", "INTEGER_RANGES", "check_shape", "field_named"]

INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,19})")
INTEGER_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_MAX_SHOWN: Final = 200


def check_shape(value: Any, descriptor: Descriptor, path: str = "") -> None:
    """Check the JSON of a message; the types with a JSON form of their own are left alone.

    Raises:
        MeshError: INVALID_ARGUMENT, for the first field at fault.
    """
    if descriptor.full_name.startswith("google.protobuf."):
        return
    if not isinstance(value, dict):
        raise _wrong(path or "body", value, "an object")
    seen: set[str] = set()
    for key, item in value.items():
        at = f"{path}.{key[:_MAX_SHOWN]}" if path else key[:_MAX_SHOWN]
        field = field_named(descriptor, key)
        if field is None:
            raise invalid(at, f"unknown field of {descriptor.name}")
        if field.name in seen:
            raise invalid(at, "given twice, in both spellings")
        seen.add(field.name)
        if item is not None:
            _check_field(item, field, at)


def field_named(descriptor: Descriptor, name: str) -> FieldDescriptor | None:
    """Find a field by its proto name or its JSON name."""
    for field in descriptor.fields:
        if name in (field.name, field.json_name):
            return field
    return None


def _check_field(value: Any, field: FieldDescriptor, at: str) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        if not isinstance(value, dict):
            raise _wrong(at, value, "an object")
        for key, item in value.items():
            _check_one(item, inner.fields_by_name["value"], f"{at}[{key[:_MAX_SHOWN]!r}]")
    elif field.is_repeated:
        if not isinstance(value, list):
            raise _wrong(at, value, "an array")
        for index, item in enumerate(value):
            _check_one(item, field, f"{at}[{index}]")
    else:
        _check_one(value, field, at)


def _check_one(value: Any, field: Any, at: str) -> None:
    kind = field.cpp_type
    if field.message_type is not None:
        check_shape(value, field.message_type, at)
    elif kind in INTEGER_RANGES:
        _check_integer(value, INTEGER_RANGES[kind], at)
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise _wrong(at, value, "true or false")
    elif kind == FieldDescriptor.CPPTYPE_ENUM:
        is_name = isinstance(value, str) and value in field.enum_type.values_by_name
        if not is_name and (isinstance(value, bool) or not isinstance(value, int)):
            raise _wrong(at, value, f"one of {', '.join(field.enum_type.values_by_name)}")
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        if not isinstance(value, str):
            raise _wrong(at, value, "a string")
    elif isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(at, value, "a number")


def _check_integer(value: Any, limits: tuple[int, int], at: str) -> None:
    low, high = limits
    is_text = isinstance(value, str) and INTEGER.fullmatch(value) is not None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_text and not (is_number and value == value // 1):
        raise _wrong(at, value, "an integer")
    if not low <= int(value) <= high:
        raise _wrong(at, value, f"an integer from {low} to {high}")


def _wrong(at: str, value: Any, expected: str) -> Exception:
    if isinstance(value, dict | list):
        shown = "an object" if isinstance(value, dict) else "an array"
    elif value is None or isinstance(value, bool):
        shown = json.dumps(value)
    else:
        shown = repr(value)[:_MAX_SHOWN]
    return invalid(at, f"{shown}: expected {expected}")
