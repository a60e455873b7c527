"""Finds which architectures of the installed transformers run in shards exactly.

Every causal language model that transformers knows is built tiny with random weights and
compared, whole and in three shards. A separate process tries them one after another, and is
replaced when it hangs or dies, so that one architecture cannot end the survey.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from meshnet.errors import Code, ConfigError, MeshError
from meshnet_node.hf.exact import find_difference, save_random_model
from meshnet_node.hf.tiny import tiny_config

__all__ = ["SurveyRow", "causal_model_types", "run_survey", "write_verified"]

_VERIFIED: Final = Path(__file__).parents[1] / "architectures.json"
_WORKER: Final = ("-m", "meshnet_node.hf.survey")
_START_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class SurveyRow:
    """What was found of one model type.

    Attributes:
        model_type: as in ``config.json``.
        architecture: the class that transformers runs it with.
        exact: whether shards gave the whole model's logits bit for bit, in bfloat16.
        reason: why not; empty where `exact`.
    """

    model_type: str
    architecture: str
    exact: bool
    reason: str


def causal_model_types() -> dict[str, str]:
    """Give the causal model types that transformers knows, each with its class's name."""
    return {
        config.model_type: str(MODEL_FOR_CAUSAL_LM_MAPPING[config].__name__)  # type: ignore[attr-defined]  # wrongly typed
        for config in MODEL_FOR_CAUSAL_LM_MAPPING
    }


def run_survey(
    on_row: Callable[[SurveyRow], None] | None = None,
    *,
    only: Collection[str] | None = None,
    limit: int | None = None,
    timeout_s: float = 120.0,
) -> list[SurveyRow]:
    """Try architectures and tell which are exact in shards.

    Args:
        on_row: called with each row as it is found.
        only: model types to try; None tries all.
        limit: tries at most so many, in alphabetical order.
        timeout_s: for one architecture.

    Raises:
        ConfigError: `only` names a type that transformers does not know.
        MeshError: DEADLINE_EXCEEDED: the process that tries them does not start.
    """
    known = causal_model_types()
    if unknown := sorted(set(only or ()) - set(known)):
        raise ConfigError(
            f"model type {unknown[0]!r} is none of the {len(known)} causal model types of "
            f"transformers {transformers.__version__}",
            field="only",
        )
    rows = []
    worker = _Worker()
    try:
        for model_type in sorted(only or known)[:limit]:
            reason = worker.ask(model_type, timeout_s)
            row = SurveyRow(model_type, known[model_type], not reason, reason)
            rows.append(row)
            if on_row is not None:
                on_row(row)
    finally:
        worker.stop()
    return rows


def write_verified(rows: Collection[SurveyRow], path: Path = _VERIFIED) -> None:
    """Write the list that `load` checks a model against."""
    value = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "verified": {row.model_type: row.architecture for row in rows if row.exact},
        "refused": {row.model_type: row.reason for row in rows if not row.exact},
    }
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


class _Worker:
    """A process that tries one model type after another, started anew when it fails."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(self, model_type: str, timeout_s: float) -> str:
        """Give why `model_type` is not exact, or nothing where it is."""
        process = self._process or self._start()
        if process.stdin is None:
            raise RuntimeError("the worker was started without a pipe")
        process.stdin.write(model_type + "\n")
        process.stdin.flush()
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.stop()
            return f"no answer within {timeout_s:g} s"
        if not line:
            status = process.wait()
            self.stop()
            return f"the process died with status {status}"
        return str(json.loads(line))

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(  # noqa: S603  # this interpreter, on this module
            [sys.executable, *_WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answers = queue.SimpleQueue()
        threading.Thread(
            target=_pump, args=(self._process.stdout, self._answers), daemon=True
        ).start()
        try:
            # Its imports are not counted against the first architecture.
            self._answers.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            self.stop()
            raise MeshError(
                Code.DEADLINE_EXCEEDED,
                f"torch and transformers were not imported within {_START_TIMEOUT_S:.0f} s",
            ) from None
        return self._process


def _pump(stream: IO[str] | None, answers: queue.SimpleQueue[str]) -> None:
    for line in stream or ():
        answers.put(line)
    answers.put("")


def _try(model_type: str) -> str:
    by_type = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    stage, directory = "cannot be shrunk", "\0"
    # Whatever a model raises is the finding.
    try:
        config = tiny_config(by_type[model_type])
        with tempfile.TemporaryDirectory() as directory:
            stage = "cannot be built"
            save_random_model(config, Path(directory))
            stage = "cannot be compared"
            return find_difference(Path(directory))
    except Exception as error:  # noqa: BLE001
        first_line = (str(error).splitlines() or [""])[0]
        message = first_line.replace(directory, model_type)
        return f"{stage}: {type(error).__name__}: {message}"[:300]


def _serve(requests: IO[str], answers: IO[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers.write("ready\n")
    answers.flush()
    for line in requests:
        answers.write(json.dumps(_try(line.strip())) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
