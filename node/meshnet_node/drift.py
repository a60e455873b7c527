"""Whether a shard still gives what it gave before: a node's own judgement of its probes.

The control plane compares with the model's reference, and its word counts. This needs none: it
finds at once what went wrong since, also of models without a reference, or while the control
plane is away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from meshnet.probes import HEAD, WHOLE, PartReport, Report, hidden_input, make_sketch

__all__ = ["Drift"]

_TOLERANCE: Final = 0.1
"""Of what a part adds to its input. The same machine differs by rounding at most, as between
numbers of threads; README states how much that is.
"""


class Drift:
    """Compares with what was found first, or trusted last.

    Args:
        hidden_size: of the shard.
    """

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._before: Mapping[str, PartReport] | None = None

    def trust(self, report: Report) -> None:
        """Compare with this report from now on."""
        self._before = report.parts

    def find(self, parts: Mapping[str, PartReport]) -> str:
        """Say what has changed; empty for nothing. The first ones are trusted."""
        before = self._before
        if before is None:
            self._before = parts
            return ""
        for name, part in parts.items():
            old = before.get(name, PartReport())
            if part.digest != old.digest:
                return f"the weights of {name} have changed in memory"
            for now, then in ((part.sketch, old.sketch), (part.against, old.against)):
                if now is None or then is None:
                    continue
                off = _distance(now, then) / self._scale(name, then)
                if not off <= _TOLERANCE:  # nor a number
                    return f"{name} computes something else than before: off by {off:.3g}"
        return ""

    def _scale(self, name: str, sketch: npt.NDArray[np.float32]) -> float:
        """Give the length of what a part adds to its input, about: sketches are linear."""
        layer = 0 if name in (HEAD, WHOLE) else int(name.rpartition(".")[2])
        if not layer:
            return float(np.linalg.norm(sketch)) or 1.0
        return _distance(sketch, make_sketch(hidden_input(layer, self._hidden_size))) or 1.0


def _distance(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.norm(one.astype(np.float64) - other.astype(np.float64)))
