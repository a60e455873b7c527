"""What is fuzzed: one module a target, each with ``check(data)``.

``check`` takes any bytes. What may leave the code under test is caught there by name; any
other exception is a finding, and so is a result that breaks a promise of its docstring.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TARGETS"]

TARGETS: Final = (
    "wire",
    "http1",
    "codec",
    "cache_wire",
    "transcoder",
    "gguf",
    "model_files",
    "openai",
    "tokens",
)
"""Names of the modules here, in the order in which they are run."""
