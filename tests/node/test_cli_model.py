"""``meshnet model``: what it writes, prints and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from meshnet.errors import ConfigError
from meshnet.model_dir import read_model_dir
from meshnet_node.cli_model import app
from meshnet_node.hf import survey
from meshnet_node.hf.survey import SurveyRow
from meshnet_node.model_files import resolve_model
from tests.node.gguf_files import write_gguf


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_import_prints_json_on_stdout_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    result = run("import", tmp_path / "tiny.gguf", tmp_path / "tiny", "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["directory"] == str(tmp_path / "tiny")
    assert (printed["architecture"], printed["num_layers"]) == ("llama", 3)
    assert printed["dtype"] == "bfloat16"
    assert set(printed["files"]) | {"meshnet.json", "meshnet-reference.json"} == {
        path.name for path in (tmp_path / "tiny").iterdir()
    }
    assert resolve_model(printed["directory"]).name == "tiny"


def test_import_options(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "tiny"
    options = ("--dtype", "float32", "--max-shard-size", "64KiB")
    result = run("import", tmp_path / "tiny.gguf", target, *options)
    assert result.exit_code == 0, result.stderr
    assert "llama, 3 layers" in result.stdout
    assert read_model_dir(target).dtype == "float32"
    assert len(list(target.glob("*.safetensors"))) > 3
    again = run("import", tmp_path / "tiny.gguf", target, "--force")
    assert again.exit_code == 0, again.stderr
    assert len(list(target.glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FILE"], "1 paths given, expected FILE.gguf and DIR"),
        (["FILE", "DIR", "MORE"], "3 paths given"),
        (["--bundled", "FILE", "DIR"], "2 paths given, expected DIR alone with --bundled"),
        (["FILE", "DIR", "--max-shard-size", "many"], "--max-shard-size: 'many'"),
        (["FILE", "DIR", "--max-shard-size", "0"], "--max-shard-size: '0'"),
        (["FILE", "DIR", "--max-shard-size", "-5MB"], "--max-shard-size: '-5MB'"),
        (["/nowhere/model.gguf", "DIR"], "/nowhere/model.gguf: cannot read"),
        (["FILE", "FULL"], "not empty"),
    ],
)
def test_wrong_use(tmp_path: Path, arguments: list[str], said: str) -> None:
    write_gguf(tmp_path / "FILE")
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "x").touch()
    names = {"FILE", "DIR", "MORE", "FULL"}
    result = run("import", *(tmp_path / part if part in names else part for part in arguments))
    assert isinstance(result.exception, ConfigError)
    assert said in result.exception.message
    assert result.stdout == ""
    assert not (tmp_path / "DIR").exists()


def test_survey_of_one_type() -> None:
    result = run("survey", "--only", "llama", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == [
        {
            "model_type": "llama",
            "architecture": "LlamaForCausalLM",
            "exact": True,
            "reason": "",
        }
    ]


def test_survey_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(on_row: Callable[[SurveyRow], None], *, only: object) -> list[SurveyRow]:
        found = [
            SurveyRow("llama", "LlamaForCausalLM", True, ""),
            SurveyRow("bamba", "BambaForCausalLM", False, "logits differ"),
        ]
        for row in found:
            on_row(row)
        return found

    monkeypatch.setattr(survey, "run_survey", rows)
    result = run("survey")
    assert result.exit_code == 0, result.stderr
    assert "BambaForCausalLM" in result.stdout
    assert "logits differ" in result.stdout
    assert "1 of 2 exact" in result.stdout


def test_survey_of_an_unknown_type() -> None:
    result = run("survey", "--only", "no-such-type")
    assert isinstance(result.exception, ConfigError)
    assert "'no-such-type'" in result.exception.message


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, meshnet_node.cli_model\n"
        "sys.exit(str([name for name in ('torch', 'transformers') if name in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""
