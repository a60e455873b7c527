"""A model's text side, held against transformers' reading of the same directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from meshnet.errors import Code, ConfigError, MeshError
from meshnet_gateway.model_text import ModelText
from tests.gateway.fakes import CHATML, EOS, write_model

TALK = [
    {"role": "system", "content": "be <brief> & \"plain\" 'now'"},
    {"role": "user", "content": "hello <|im_end|> \u4e2d\U0001f600\n"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "  again "},
]
TEMPLATES = {
    "chatml": CHATML,
    "blocks": (
        "{{ bos_token }}\n"
        "    {% for message in messages %}\n"
        "        {% if loop.index0 > 2 %}{% continue %}{% endif %}\n"
        "[{{ message.role }}] {{ message.content | trim }}\n"
        "    {% endfor %}\n"
        "{%- if not pad_token is defined %}no pad{% endif %}{{ unk_token }}"
    ),
    "json": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools is none }}",
    "generation": (
        "{% for message in messages %}{% generation %}{{ message['content'] }}"
        "{% endgeneration %}{{ eos_token }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if ns.n == 3 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}"
    ),
    "date": "{{ strftime_now('%Y')[:2] }}{{ add_generation_prompt }}",
}


def reference_ids(directory: Path, messages: list[dict[str, str]]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True
    )
    ids: list[int] = encoded["input_ids"]
    return ids


def change(directory: Path, file: str, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    path = directory / file
    values = json.loads(path.read_text()) if path.exists() else {}
    values.update(changes)
    path.write_text(json.dumps({name: item for name, item in values.items() if item is not None}))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("in_file", [False, True])
def test_chat_ids_equal_transformers(tmp_path: Path, template: str, in_file: bool) -> None:
    write_model(tmp_path, template=None if in_file else TEMPLATES[template])
    if in_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template])
    ids = ModelText.load(tmp_path).encode_chat(TALK)
    assert ids
    assert ids == reference_ids(tmp_path, TALK)


def test_template_file_comes_before_the_configured_one_and_default_is_chosen(
    tmp_path: Path,
) -> None:
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": "hello"}]
    write_model(tmp_path, template=None)
    change(tmp_path, "tokenizer_config.json", chat_template=named)
    assert ModelText.load(tmp_path).encode_chat(TALK) == reference_ids(tmp_path, TALK)
    (tmp_path / "chat_template.jinja").write_text("world")
    text = ModelText.load(tmp_path)
    assert text.encode_chat(TALK) == text.encode("world") == reference_ids(tmp_path, TALK)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},  # tokenizer.json alone decides
    ],
)
@pytest.mark.parametrize("with_start", [False, True])
@pytest.mark.parametrize("prompt", ["hello there", " \U0001f600<|im_start|>x", "\n\n"])
def test_prompt_ids_equal_transformers(
    tmp_path: Path, flags: dict[str, bool], with_start: bool, prompt: str
) -> None:
    change(write_model(tmp_path), "tokenizer_config.json", **flags)
    if with_start:
        start = {"type_id": 0, "id": "<|endoftext|>"}
        tokens = {start["id"]: {"id": start["id"], "ids": [0], "tokens": [start["id"]]}}
        single = [{"SpecialToken": start}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        processor = {"type": "TemplateProcessing", "single": single, "pair": pair}
        change(tmp_path, "tokenizer.json", post_processor={**processor, "special_tokens": tokens})
    expected = AutoTokenizer.from_pretrained(tmp_path)(prompt)["input_ids"]
    assert ModelText.load(tmp_path).encode(prompt) == expected


def test_saved_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    write_model(tmp_path)
    plain = ModelText.load(tmp_path).encode("hello there, world")
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert ModelText.load(tmp_path).encode("hello there, world") == plain


def test_empty_prompt_becomes_the_start_token(text: ModelText) -> None:
    assert [text.token_bytes(item) for item in text.encode("")] == [b"<|endoftext|>"]


def test_template_refusals_are_the_clients_error(tmp_path: Path) -> None:
    write_model(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(MeshError, match="roles must alternate") as caught:
        ModelText.load(tmp_path).encode_chat(TALK)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "messages")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_templates_stay_in_their_sandbox(tmp_path: Path, template: str) -> None:
    write_model(tmp_path, template=template)
    with pytest.raises(MeshError) as caught:
        ModelText.load(tmp_path).encode_chat(TALK)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_model_without_template_refuses_chat_alone(tmp_path: Path) -> None:
    text = ModelText.load(write_model(tmp_path, template=None))
    with pytest.raises(MeshError, match="no chat template") as caught:
        text.encode_chat(TALK)
    assert caught.value.reason == "NO_CHAT_TEMPLATE"
    assert text.decode(text.encode("hello")) == "hello"


def test_template_that_does_not_compile_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, template="{% if %}")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: the chat template"):
        ModelText.load(tmp_path)


def test_end_tokens_come_from_all_three_files(tmp_path: Path) -> None:
    write_model(tmp_path)
    change(tmp_path, "config.json", eos_token_id=[3, 4])
    change(tmp_path, "generation_config.json", eos_token_id=5)
    text = ModelText.load(tmp_path)
    (end,) = [item for item in text.eos_ids if text.token_bytes(item) == EOS.encode()]
    assert text.eos_ids == {3, 4, 5, end}


@pytest.mark.parametrize(
    ("config", "stated", "given_limit", "expected"),
    [
        ({"max_position_embeddings": 100}, None, None, 100),
        ({"max_position_embeddings": 100}, 64, None, 64),
        ({"max_position_embeddings": 100}, 64, 32, 32),
        ({"max_position_embeddings": 100}, 10**30, 200, 100),
        ({"max_position_embeddings": None, "n_positions": 50}, 1e30, None, 50),
        (
            {"max_position_embeddings": None, "text_config": {"max_position_embeddings": 70}},
            None,
            None,
            70,
        ),
        ({"max_position_embeddings": None}, 40, None, 40),
        ({"max_position_embeddings": None}, None, 30, 30),
    ],
)
def test_context_length_is_the_smallest_known(
    tmp_path: Path,
    config: dict[str, Any],
    stated: float | None,
    given_limit: int | None,
    expected: int,
) -> None:
    write_model(tmp_path)
    change(tmp_path, "config.json", **config)
    change(tmp_path, "tokenizer_config.json", model_max_length=stated)
    assert ModelText.load(tmp_path, context_length=given_limit).context_length == expected


def test_unknown_context_length_is_an_error(tmp_path: Path) -> None:
    change(write_model(tmp_path), "config.json", max_position_embeddings=None)
    with pytest.raises(ConfigError, match="no context length"):
        ModelText.load(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe"])
def test_unreadable_files_are_named(tmp_path: Path, file: str, content: bytes | None) -> None:
    write_model(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=file):
        ModelText.load(tmp_path)


def test_fingerprint_follows_the_files(tmp_path: Path, text: ModelText) -> None:
    write_model(tmp_path)
    assert ModelText.load(tmp_path).fingerprint == text.fingerprint
    change(tmp_path, "config.json", vocab_size=1000)
    assert ModelText.load(tmp_path).fingerprint != text.fingerprint


def test_token_bytes_join_to_the_text(text: ModelText) -> None:
    written = "hello \u4e2d\U0001f600\u00e9\n\x00 ok <<E"
    assert b"".join(map(text.token_bytes, text.encode(written))) == written.encode()
    assert text.token_bytes(10**6) == b""
