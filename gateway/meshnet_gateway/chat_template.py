"""A model's own chat template: messages to the prompt's text, as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshnet.errors import Code, ConfigError, MeshError

__all__ = ["ChatTemplate"]


class _GenerationBlock(jinja2.ext.Extension):
    """Renders ``{% generation %}`` blocks as their contents: they only mark text for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class types it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Read the block and give its statements alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

    Templates come with the model and are not trusted: they run in jinja2's immutable sandbox,
    with the helpers that transformers gives them and nothing else.

    Args:
        source: the template's text.
        special_tokens: ``bos_token`` and the like, as variables of the template.
        origin: the file, for messages.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{origin}: the chat template does not compile: {error}", field=origin
            ) from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Write the prompt's text up to where the assistant's answer begins.

        Args:
            messages: ``role`` and ``content`` each.

        Raises:
            MeshError: INVALID_ARGUMENT, with the template's own words, for messages that
                it refuses, for example roles that do not alternate.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise MeshError(
                Code.INVALID_ARGUMENT,
                f"messages: the model's chat template refuses them: {error}",
                field="messages",
            ) from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without jinja2's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates know
    return datetime.now().strftime(format)  # noqa: DTZ005 - the user's local date, as transformers
