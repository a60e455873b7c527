"""The JSON face as OpenAPI 3.1, from the table that requests are routed by (pure).

What OpenAPI cannot say is left to the text: a model's name may hold slashes, sent as they
are; a stream is one JSON object a line.
Source: spec.openapis.org/oas/v3.1.1; ProtoJSON for the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from google.api import field_behavior_pb2  # type: ignore[import-untyped]
from google.protobuf.descriptor import (
    Descriptor,
    EnumDescriptor,
    FieldDescriptor,
    ServiceDescriptor,
)
from google.rpc import status_pb2  # type: ignore[import-untyped]

from meshnet.control.httprules import Binding, HttpRules

__all__ = ["openapi"]

Json = dict[str, Any]

_BEHAVIOR: Final = field_behavior_pb2.FieldBehavior
_DURATION: Final = r"^-?(0|[1-9][0-9]{0,11})(\.[0-9]{1,9})?s$"
_WELL_KNOWN: Final[dict[str, Json]] = {
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.Duration": {"type": "string", "pattern": _DURATION},
    "google.protobuf.FieldMask": {"type": "string", "description": "Paths, with commas between."},
    "google.protobuf.Any": {
        "type": "object",
        "properties": {"@type": {"type": "string"}},
        "required": ["@type"],
    },
}
_SCALARS: Final[dict[int, Json]] = {
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    FieldDescriptor.CPPTYPE_INT64: {"type": "string", "pattern": "^-?(0|[1-9][0-9]{0,18})$"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "string", "pattern": "^(0|[1-9][0-9]{0,18})$"},
    FieldDescriptor.CPPTYPE_FLOAT: {"type": "number"},
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": "number"},
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
}
_STREAM_TEXT: Final = "One JSON object a line; an error ends it."


def openapi(services: Iterable[ServiceDescriptor], *, title: str, version: str) -> Json:
    """Give the description of some services' annotated methods.

    Args:
        services: as served.
        title: of the API.
        version: of the API.
    """
    schemas = _Schemas()
    paths: dict[str, Json] = {}
    seen: dict[str, int] = {}
    for binding in HttpRules(services).bindings:
        service, name = binding.rpc.lstrip("/").rsplit("/", 1)
        seen[name] = seen.get(name, 0) + 1
        operation = {
            "operationId": name if seen[name] == 1 else f"{name}{seen[name]}",
            "tags": [service.rpartition(".")[2]],
            **_operation(binding, schemas),
        }
        path, parameters = _path(binding)
        operation["parameters"] = [*parameters, *_query(binding, schemas)]
        paths.setdefault(path, {})[binding.http_method.lower()] = operation
    return {
        "openapi": "3.1.1",
        "info": {"title": title, "version": version},
        "servers": [{"url": "/"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.found.items()))},
    }


class _Schemas:
    """Schemas of the messages and enums met so far, by full name."""

    def __init__(self) -> None:
        self.found: dict[str, Json] = {}

    def of_message(self, descriptor: Descriptor) -> Json:
        """Give a reference to a message's schema, or the schema of one with a JSON of its own."""
        name = descriptor.full_name
        if name in _WELL_KNOWN:
            return _WELL_KNOWN[name]
        if name not in self.found:
            self.found[name] = {}  # a message may hold itself
            self.found[name] = self._message(descriptor)
        return {"$ref": f"#/components/schemas/{name}"}

    def of_field(self, field: FieldDescriptor) -> Json:
        """Give a field's schema."""
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            value = inner.fields_by_name["value"]
            return {"type": "object", "additionalProperties": self._of_one(value)}
        one = self._of_one(field)
        return {"type": "array", "items": one} if field.is_repeated else one

    def _of_one(self, field: Any) -> Json:
        if field.message_type is not None:
            return self.of_message(field.message_type)
        if field.enum_type is not None:
            return self._of_enum(field.enum_type)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return {"type": "string", "contentEncoding": "base64"}
        return _SCALARS[field.cpp_type]

    def _of_enum(self, enum: EnumDescriptor) -> Json:
        self.found[enum.full_name] = {"type": "string", "enum": [v.name for v in enum.values]}
        return {"$ref": f"#/components/schemas/{enum.full_name}"}

    def _message(self, descriptor: Descriptor) -> Json:
        properties = {}
        for field in descriptor.fields:
            schema = self.of_field(field)
            if "OUTPUT_ONLY" in _behaviors(field):
                schema = {**schema, "readOnly": True}
            properties[field.json_name] = schema
        required = [f.json_name for f in descriptor.fields if "REQUIRED" in _behaviors(f)]
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**schema, "required": required} if required else schema


def _operation(binding: Binding, schemas: _Schemas) -> Json:
    response: Any = binding.response_type.DESCRIPTOR
    answer = schemas.of_message(response)
    status = schemas.of_message(status_pb2.Status.DESCRIPTOR)
    description = "The answer."
    if binding.is_stream:
        description = _STREAM_TEXT
        answer = {
            "oneOf": [
                {"type": "object", "properties": {"result": answer}, "required": ["result"]},
                {"type": "object", "properties": {"error": status}, "required": ["error"]},
            ]
        }
    operation: Json = {
        "responses": {
            "200": _content(answer, description),
            "default": _content(status, "An error."),
        }
    }
    if binding.body:
        request: Any = binding.request_type.DESCRIPTOR
        schema = schemas.of_message(request)
        if binding.body != "*":
            schema = schemas.of_field(request.fields_by_name[binding.body])
        elif binding.template.captures:
            schema = _without(schemas.found[request.full_name], _bound(binding))
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation


def _without(schema: Json, names: set[str]) -> Json:
    """Give a message's schema without the fields that the path carries."""
    properties = {key: value for key, value in schema["properties"].items() if key not in names}
    required = [name for name in schema.get("required", ()) if name not in names]
    return {**schema, "properties": properties, "required": required}


def _content(schema: Json, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _path(binding: Binding) -> tuple[str, list[Json]]:
    """Write a path template as OpenAPI does, with a parameter for each wildcard."""
    template = binding.template
    segments, parameters = [], []
    for index, segment in enumerate(template.segments):
        if segment not in ("*", "**"):
            segments.append(segment)
            continue
        before = template.segments[index - 1] if index else ""
        name = before.removesuffix("s") if before.isidentifier() else f"part{index}"
        parameter: Json = {"name": name, "in": "path", "required": True}
        parameter["schema"] = {"type": "string", "minLength": 1}
        if segment == "**":
            parameter["description"] = "May hold slashes, sent as they are."
        parameters.append(parameter)
        segments.append(f"{{{name}}}")
    verb = f":{template.verb}" if template.verb else ""
    return "/" + "/".join(segments) + verb, parameters


def _bound(binding: Binding) -> set[str]:
    return {capture.field_path for capture in binding.template.captures}


def _query(binding: Binding, schemas: _Schemas) -> Iterator[Json]:
    """Give the parameters for what neither path nor body carries."""
    if binding.body == "*":
        return
    bound = _bound(binding) | {binding.body}
    request: Any = binding.request_type.DESCRIPTOR
    for path, field in _leaves(request, "", "", bound):
        parameter: Json = {"name": path, "in": "query", "schema": schemas.of_field(field)}
        if "REQUIRED" in _behaviors(field) and "." not in path:
            parameter["required"] = True
        yield parameter


def _leaves(
    descriptor: Descriptor, prefix: str, path: str, bound: set[str]
) -> Iterator[tuple[str, FieldDescriptor]]:
    """Give the fields that a query can set: their JSON paths and descriptors."""
    for field in descriptor.fields:
        at, name = f"{path}{field.name}", f"{prefix}{field.json_name}"
        inner = field.message_type
        if at in bound or (inner is not None and field.is_repeated):
            continue
        if inner is None or inner.full_name in _WELL_KNOWN:
            yield name, field
        elif at.count(".") < 1:
            yield from _leaves(inner, f"{name}.", f"{at}.", bound)


def _behaviors(field: FieldDescriptor) -> set[str]:
    numbers = field.GetOptions().Extensions[field_behavior_pb2.field_behavior]
    return {_BEHAVIOR.Name(number) for number in numbers}
