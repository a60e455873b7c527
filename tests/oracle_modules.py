"""The control plane's oracle, tests/control/oracle, whose modules lie in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).parent / "control" / "oracle"


def load(name: str) -> Any:
    """Import one of its modules."""
    spec = importlib.util.spec_from_file_location(f"oracle_{name}", ORACLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
