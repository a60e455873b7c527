"""The route table: google.api.http annotations of services, ready to look paths up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.api import annotations_pb2, http_pb2  # type: ignore[import-untyped]
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from meshnet.control.binding import check_path_field
from meshnet.control.template import PathTemplate, parse_template, split_path

__all__ = ["Binding", "HttpRules"]

_PATTERNS: Final = ("get", "put", "post", "delete", "patch")


@dataclass(frozen=True, slots=True)
class Binding:
    """One HTTP method and path template of one RPC.

    Attributes:
        http_method: upper case.
        template: of the path.
        body: field that the body is bound to, ``*``, or empty for none.
        rpc: ``/package.Service/Method``.
        request_type: message class.
        response_type: message class.
        is_stream: whether the server streams.
    """

    http_method: str
    template: PathTemplate
    body: str
    rpc: str
    request_type: type[Message]
    response_type: type[Message]
    is_stream: bool


class HttpRules:
    """The bindings of some services.

    Attributes:
        bindings: most particular first.

    Raises:
        ValueError: an annotation that breaks http.proto's rules or this server's: two
            bindings of the same paths, client streaming, or response_body.
    """

    def __init__(self, services: Iterable[ServiceDescriptor]) -> None:
        bindings = [b for service in services for m in service.methods for b in _bindings(m)]
        seen: dict[Any, Binding] = {}
        for binding in bindings:
            template = binding.template
            shape = (binding.http_method, template.verb, template.segments)
            if shape in seen:
                raise ValueError(f"{binding.rpc} and {seen[shape].rpc} are bound to the same paths")
            seen[shape] = binding
        self.bindings: Sequence[Binding] = sorted(
            bindings, key=lambda binding: binding.template.precedence
        )

    def find(self, raw_path: str) -> Sequence[tuple[Binding, Mapping[str, str]]]:
        """Give the bindings of all HTTP methods that a path fits, most particular first.

        A verb that is bound for one method is not data for another.

        Raises:
            MeshError: INVALID_ARGUMENT, the path has a malformed escape.
        """
        segments = split_path(raw_path)
        found = []
        for binding in self.bindings:
            values = binding.template.match(segments)
            if values is not None:
                found.append((binding, values))
        with_verb = [item for item in found if item[0].template.verb]
        return with_verb or found


def _bindings(method: MethodDescriptor) -> Iterator[Binding]:
    options = method.GetOptions()
    if not options.HasExtension(annotations_pb2.http):
        return
    rule = options.Extensions[annotations_pb2.http]
    yield _binding(method, rule)
    for additional in rule.additional_bindings:
        yield _binding(method, additional)


def _binding(method: MethodDescriptor, rule: http_pb2.HttpRule) -> Binding:
    name = method.full_name
    pattern = rule.WhichOneof("pattern")
    if pattern == "custom":
        http_method, path = rule.custom.kind, rule.custom.path
    elif pattern in _PATTERNS:
        http_method, path = pattern.upper(), getattr(rule, pattern)
    else:
        raise ValueError(f"{name} has an http annotation without a pattern")
    if rule.response_body or method.client_streaming:
        raise ValueError(f"{name}: response_body and client streaming are not served")
    inputs, outputs = method.input_type, method.output_type
    template = parse_template(path)
    for capture in template.captures:
        check_path_field(inputs, capture.field_path)
    if rule.body not in ("", "*") and rule.body not in inputs.fields_by_name:
        raise ValueError(f"{name}: body {rule.body!r} is no field of {inputs.full_name}")
    return Binding(
        http_method,
        template,
        rule.body,
        f"/{method.containing_service.full_name}/{method.name}",
        message_factory.GetMessageClass(inputs),
        message_factory.GetMessageClass(outputs),
        method.server_streaming,
    )
