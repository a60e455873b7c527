"""Reading a request's JSON object field by field, with errors that name the field (pure)."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from typing import Any, Final, NoReturn

from meshnet.jsontext import check_nesting
from meshnet_gateway.limits import DEFAULT_LIMITS, GatewayLimits
from meshnet_gateway.openai_errors import bad_request, shown

__all__ = ["Fields", "parse_object"]

_SHOWN_CHARS: Final = 80


class Fields:
    """A JSON object, read by name; null counts as omitted.

    Args:
        values: the object.
        path: before the names in messages, as ``stream_options.``.
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._known: set[str] = set()

    def get(self, name: str) -> Any:
        """Give a field's value of any type, None where it is omitted or null."""
        self._known.add(name)
        return self._values.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Give a whole number from `low` to `high`."""
        value = self.get(name)
        if value is None:
            return None
        expected = f"an integer from {low} to {high}"
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(name, value, expected, "invalid_type")
        if not low <= value <= high:
            self.fail(name, value, expected)
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """Give a number from `low` to `high`."""
        value = self.get(name)
        if value is None:
            return default
        expected = f"a number from {low:g} to {high:g}"
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.fail(name, value, expected, "invalid_type")
        if not low <= value <= high:
            self.fail(name, value, expected)
        return float(value)

    def boolean(self, name: str) -> bool:
        """Give true or false, false where the field is omitted."""
        value = self.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.fail(name, value, "true or false", "invalid_type")
        return value

    def string(self, name: str) -> str | None:
        """Give a string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.fail(name, value, "a string", "invalid_type")
        return value

    def array(self, name: str) -> list[Any] | None:
        """Give an array."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            self.fail(name, value, "an array", "invalid_type")
        return value

    def nested(self, name: str) -> Fields | None:
        """Give a nested object's fields."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(name, value, "an object", "invalid_type")
        return Fields(value, f"{self._path}{name}.")

    def names(self) -> list[str]:
        """Give the names of all fields, for an object whose names are data."""
        self._known.update(self._values)
        return list(self._values)

    def ignore(self, *names: str) -> None:
        """Accept fields that change nothing here."""
        self._known.update(names)

    def refuse(self, name: str, *neutral: object) -> None:
        """Refuse a field that would alter the output, unless it says nothing.

        Args:
            name: a field of OpenAI's that is not supported.
            neutral: values that ask for nothing beyond the default.
        """
        value = self.get(name)
        if value is not None and value not in neutral:
            raise bad_request(
                f"{self._path}{name}: {shown(value)}; not supported here; expected none",
                self._path + name,
                "unsupported_parameter",
            )

    def done(self) -> None:
        """Refuse fields that nothing read: a misspelt name must not be passed over."""
        for name in self._values:
            if name not in self._known:
                raise bad_request(
                    f"{shown(self._path + name)}: unknown parameter; expected one of"
                    f" {', '.join(sorted(self._known))}",
                    self._path + name,
                    "unknown_parameter",
                )

    def fail(
        self, name: str, value: object, expected: str, code: str = "invalid_value"
    ) -> NoReturn:
        """Refuse a field's value, saying what was expected."""
        path = self._path + name
        raise bad_request(f"{path}: {shown(value)}; expected {expected}", path, code)

    def missing(self, name: str, expected: str) -> NoReturn:
        """Refuse a request that lacks a field it needs."""
        path = self._path + name
        raise bad_request(
            f"{path}: missing; expected {expected}", path, "missing_required_parameter"
        )


def parse_object(body: bytes | bytearray, limits: GatewayLimits = DEFAULT_LIMITS) -> Fields:
    """Read a request's body; its structure is bounded before anything is made of it.

    Raises:
        MeshError: INVALID_ARGUMENT, for anything but a JSON object of finite numbers and
            valid Unicode, nested within `limits`, or for an object with a name twice: of two
            models or prompts, who checks a request may see one and who serves it the other.
    """
    try:
        check_nesting(
            body, max_depth=limits.max_json_depth, max_containers=limits.max_json_containers
        )
        text = body.decode("utf-8")
        repeating: list[_Repeating] = []
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=partial(_object, repeating),
        )
        # Escapes may spell half of a surrogate pair, which no tokenizer can take.
        if r"\ud" in text or r"\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request(
            "body: a string with half of a surrogate pair; expected Unicode text",
            None,
            "invalid_json",
        ) from None
    except ValueError as error:
        raise bad_request(f"body: not JSON: {error}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("body: expected a JSON object", None, "invalid_json")
    if repeating:
        path = _path_of_repeated(value)
        raise bad_request(f"{shown(path)}: given twice; expected once", path, "duplicate_parameter")
    return Fields(value)


class _Repeating(dict[str, Any]):
    """An object of which a name came twice.

    Attributes:
        name: that one.
    """

    name = ""


def _object(repeating: list[_Repeating], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; one that has a name twice is noted in `repeating`."""
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    found = _Repeating(values)
    ((found.name, _),) = Counter(name for name, _ in pairs).most_common(1)
    repeating.append(found)
    return found


def _path_of_repeated(value: Any, path: str = "") -> str:
    """Find the first name that came twice, as ``messages[0].content``; empty where none did."""
    if isinstance(value, _Repeating):
        return f"{path}{value.name[:_SHOWN_CHARS]}"
    if isinstance(value, dict):
        inner = ((item, f"{path}{name[:_SHOWN_CHARS]}") for name, item in value.items())
    elif isinstance(value, list):
        inner = ((item, f"{path[:-1]}[{index}]") for index, item in enumerate(value))
    else:
        return ""
    return next(filter(None, (_path_of_repeated(item, f"{at}.") for item, at in inner)), "")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of a number's range")
    return value
