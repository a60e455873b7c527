"""The messages of a chat request (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from meshnet_gateway.openai_errors import bad_request
from meshnet_gateway.openai_fields import Fields

__all__ = ["Message", "read_messages"]

_ROLES: Final = {
    "assistant": "assistant",
    "developer": "system",  # OpenAI's newer name; templates know the older one
    "system": "system",
    "user": "user",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user`` or ``assistant``.
        content: text.
    """

    role: str
    content: str


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """Read a request's messages.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the message's field.
    """
    expected = "an array of at least one message"
    items = fields.array("messages")
    if items is None:
        fields.missing("messages", expected)
    if not items:
        fields.fail("messages", items, expected)
    return tuple(_read_message(item, f"messages[{index}]") for index, item in enumerate(items))


def _read_message(item: Any, path: str) -> Message:
    if not isinstance(item, dict):
        raise bad_request(f"{path}: expected an object with role and content", path, "invalid_type")
    fields = Fields(item, f"{path}.")
    role = fields.string("role")
    if role is None:
        fields.missing("role", f"one of {', '.join(_ROLES)}")
    if role in ("tool", "function"):
        fields.refuse("role")
    if role not in _ROLES:
        fields.fail("role", role, f"one of {', '.join(_ROLES)}")
    content = _read_content(fields, f"{path}.content")
    fields.refuse("tool_calls", [])
    for name in ("function_call", "tool_call_id", "audio"):
        fields.refuse(name)
    fields.ignore("name", "refusal", "annotations")
    fields.done()
    return Message(_ROLES[role], content)


def _read_content(fields: Fields, path: str) -> str:
    expected = "a string or an array of text parts"
    value = fields.get("content")
    if value is None:
        fields.missing("content", expected)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        fields.fail("content", value, expected, "invalid_type")
    return "\n".join(_read_part(item, f"{path}[{index}]") for index, item in enumerate(value))


def _read_part(item: Any, path: str) -> str:
    if not isinstance(item, dict):
        raise bad_request(f"{path}: expected an object with type and text", path, "invalid_type")
    part = Fields(item, f"{path}.")
    kind = part.string("type")
    if kind is None:
        part.missing("type", "text")
    part.refuse("type", "text")
    text = part.string("text")
    if text is None:
        part.missing("text", "a string")
    part.done()
    return text
