"""The survey: which architectures run in shards exactly, each tried in a process apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshnet.errors import ConfigError
from meshnet_node.architectures import verified_model_types
from meshnet_node.hf import survey
from meshnet_node.hf.survey import SurveyRow, causal_model_types, run_survey, write_verified

ANSWER_EXACT = """
print("ready", flush=True)
while input():
    print('""', flush=True)
"""


def test_it_tells_exact_architectures_from_others() -> None:
    """Mamba keeps a float32 residual, which the bfloat16 border rounds."""
    seen: list[SurveyRow] = []
    rows = run_survey(seen.append, only=["qwen3_next", "mamba", "openai-gpt"])
    assert rows == seen
    assert [(row.model_type, row.architecture, row.exact) for row in rows] == [
        ("mamba", "MambaForCausalLM", False),
        ("openai-gpt", "OpenAIGPTLMHeadModel", False),
        ("qwen3_next", "Qwen3NextForCausalLM", True),
    ]
    assert "logits differ by" in rows[0].reason
    assert "takes no KV cache" in rows[1].reason
    assert rows[2].reason == ""


def test_limit_takes_the_first_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_WORKER", ("-c", ANSWER_EXACT))
    rows = run_survey(only=["llama", "gpt2", "qwen2"], limit=2)
    assert [(row.model_type, row.exact) for row in rows] == [("gpt2", True), ("llama", True)]


def test_an_architecture_that_hangs_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_WORKER", ("-c", "print('ready', flush=True); input(); input()"))
    rows = run_survey(only=["gpt2", "llama"], timeout_s=0.1)
    assert [row.reason for row in rows] == ["no answer within 0.1 s"] * 2


def test_an_architecture_that_kills_its_process_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        survey, "_WORKER", ("-c", "print('ready', flush=True); input(); raise SystemExit(7)")
    )
    rows = run_survey(only=["gpt2", "llama"])
    assert [row.reason for row in rows] == ["the process died with status 7"] * 2


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nonsense' is none of the"):
        run_survey(only=["nonsense"])


def test_the_list_written_is_the_list_read(tmp_path: Path) -> None:
    path = tmp_path / "architectures.json"
    rows = [SurveyRow("a", "AForCausalLM", True, ""), SurveyRow("b", "B", False, "differs")]
    write_verified(rows, path)
    value = json.loads(path.read_text())
    assert value["verified"] == {"a": "AForCausalLM"}
    assert value["refused"] == {"b": "differs"}
    assert value["transformers"]


def test_the_packaged_list_names_types_that_transformers_knows() -> None:
    verified = verified_model_types()
    assert len(verified) > 100
    assert verified <= set(causal_model_types())
