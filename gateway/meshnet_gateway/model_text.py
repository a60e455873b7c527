"""A model's text side, from its directory: tokenizer, chat template, limits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from meshnet.errors import Code, ConfigError, MeshError
from meshnet.model_dir import read_file, read_json, read_text
from meshnet_gateway.chat_template import ChatTemplate
from meshnet_gateway.token_bytes import TokenBytes

__all__ = ["ModelText"]

_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_TOKENIZER_BYTES: Final = 256 << 20
_MAX_TEMPLATE_BYTES: Final = 1 << 20
_CONTEXT_FIELDS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_UNBOUNDED: Final = 10**9
"""transformers writes 1e30 as model_max_length where a tokenizer knows no limit."""


class ModelText:
    """Tokenizer, chat template, end tokens and context limit of one model.

    Safe to use from several threads.

    Attributes:
        context_length: tokens that prompt and completion may take together.
        vocab_size: ids are below this.
        eos_ids: tokens that end a completion.
        fingerprint: changes when the model's text side or configuration changes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        start_id: int | None,
        template: ChatTemplate | None,
        fingerprint: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._start_id = start_id
        self._token_bytes = TokenBytes(tokenizer)
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, directory: Path, *, context_length: int | None = None) -> ModelText:
        """Read a model's directory: tokenizer.json, config.json and what lies beside them.

        Args:
            directory: in the Hugging Face layout; weights are not looked at.
            context_length: lowers the model's own limit, or gives one where it has none.

        Raises:
            ConfigError: a file is missing or unreadable, or no context length is known.
        """
        tokenizer = _load_tokenizer(directory / "tokenizer.json")
        config = _read_json(directory / "config.json", required=True)
        settings = _read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(
            settings, _read_json(directory / "special_tokens_map.json")
        )
        eos_ids = _eos_ids(
            tokenizer,
            special_tokens,
            _read_json(directory / "generation_config.json"),
            config,
        )
        known_vocab = tokenizer.get_vocab_size(with_added_tokens=True)
        start = special_tokens.get("bos_token")
        start_id = tokenizer.token_to_id(start) if start is not None else None
        return cls(
            tokenizer,
            context_length=_context_length(directory, config, settings, context_length),
            vocab_size=_setting(config, "vocab_size") or known_vocab,
            eos_ids=eos_ids,
            start_id=start_id if start_id is not None else min(eos_ids, default=None),
            template=_template(directory, settings, special_tokens),
            fingerprint=_fingerprint(directory),
        )

    def encode(self, text: str) -> list[int]:
        """Give the ids of a plain prompt, with the tokens that tokenizer.json puts before it.

        An empty prompt becomes the model's start token, where it has one.
        """
        ids: list[int] = self._tokenizer.encode(text).ids
        if not ids and self._start_id is not None:
            return [self._start_id]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Give the ids of a conversation up to where the assistant's answer begins.

        Raises:
            MeshError: INVALID_ARGUMENT, for a model without a chat template, or for
                messages that its template refuses.
        """
        if self._template is None:
            raise MeshError(
                Code.INVALID_ARGUMENT,
                "this model has no chat template; expected a request to /v1/completions",
                field="messages",
                reason="NO_CHAT_TEMPLATE",
            )
        text = self._template.render(messages)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of tokens; special ones have none."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes one token stands for, which may be part of a character."""
        return self._token_bytes.of(token_id)


def _load_tokenizer(path: Path) -> Tokenizer:
    source = read_text(path, _MAX_TOKENIZER_BYTES)
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer: {error}", field=str(path)) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    return read_json(path)[0]


def _special_tokens(settings: dict[str, Any], legacy: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name, legacy.get(name))
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _eos_ids(
    tokenizer: Tokenizer, special_tokens: dict[str, str], *configs: dict[str, Any]
) -> frozenset[int]:
    ids = set()
    for config in configs:
        value = _setting(config, "eos_token_id")
        ids.update(value if isinstance(value, list) else [value])
    if "eos_token" in special_tokens:
        ids.add(tokenizer.token_to_id(special_tokens["eos_token"]))
    return frozenset(item for item in ids if isinstance(item, int))


def _context_length(
    directory: Path, config: dict[str, Any], settings: dict[str, Any], given: int | None
) -> int:
    limits = [given, *(_setting(config, name) for name in _CONTEXT_FIELDS)]
    stated = settings.get("model_max_length")
    if isinstance(stated, (int, float)) and stated < _UNBOUNDED:
        limits.append(int(stated))
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    if not known:
        raise ConfigError(
            f"{directory / 'config.json'}: no context length; expected max_position_embeddings"
            " there, model_max_length in tokenizer_config.json, or a limit in the gateway's"
            " settings",
            field=str(directory / "config.json"),
        )
    return min(known)


def _setting(config: dict[str, Any], name: str) -> Any:
    """Take a field of config.json; multimodal models nest their language model's."""
    nested = config.get("text_config")
    if config.get(name) is None and isinstance(nested, dict):
        return nested.get(name)
    return config.get(name)


def _template(
    directory: Path, settings: dict[str, Any], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return ChatTemplate(read_text(path, _MAX_TEMPLATE_BYTES), special_tokens, origin=str(path))
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {
            item.get("name"): item.get("template") for item in source if isinstance(item, dict)
        }
        source = named.get("default")
    if not isinstance(source, str):
        return None
    origin = str(directory / "tokenizer_config.json")
    return ChatTemplate(source, special_tokens, origin=origin)


def _fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        path = directory / name
        digest.update(read_file(path, _MAX_TOKENIZER_BYTES) if path.is_file() else b"")
        digest.update(b"\0")
    return f"fp_{digest.hexdigest()[:10]}"
