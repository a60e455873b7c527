"""What `meshnet bench wire` compares: sizes, stacks, rhythms and placements (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from meshnet.cli.bench.echo import EchoStack
from meshnet.cli.bench.placement import Placement
from meshnet.cli.bench.report import Run
from meshnet.errors import ConfigError

__all__ = [
    "DEFAULT_SIZES",
    "LONG_BYTES",
    "OURS",
    "OURS_AIO",
    "RAW",
    "STACKS",
    "WireCase",
    "WirePlan",
    "plan_cases",
    "shape_of",
]

OURS: Final = "meshnet"
OURS_AIO: Final = "meshnet_aio"
"""The same node, by the client of gateways."""

RAW: Final = EchoStack.RAW.value
STACKS: Final = (
    RAW,
    OURS,
    OURS_AIO,
    *(stack.value for stack in EchoStack if stack is not EchoStack.RAW),
)
DEFAULT_SIZES: Final = (1152, 32 << 10, 4 << 20, 64 << 20)
"""A token of hidden 576, a token of hidden 16384, 128 and 2048 tokens of it."""

LONG_BYTES: Final = 16 << 20
"""From this size on, a round is one request."""

_WIDEST: Final = 16384
_SMALL_BYTES: Final = 64 << 10
_PAUSE_S: Final = 0.030
_FEWEST: Final = 4


@dataclass(frozen=True)
class WirePlan:
    """What to compare.

    Attributes:
        sizes: bytes of a body, each way.
        placement: of the client and the servers; None takes two cores where there are.
        stacks: names, of `STACKS`; raw and meshnet are always measured.
        extras: also measure one core, requests after a rest, and a busy node.
    """

    sizes: tuple[int, ...] = DEFAULT_SIZES
    placement: Placement | None = None
    stacks: tuple[str, ...] = STACKS
    extras: bool = True


@dataclass(frozen=True)
class WireCase:
    """One comparison: stacks at one size, rhythm and placement.

    Attributes:
        section: of the report's JSON.
        num_bytes: of a body, each way.
        placement: of the client and the servers.
        stacks: names, of `STACKS`.
        pause_s: rest before each request.
        busy: meshnet's node has a thread that computes in Python.
    """

    section: str
    num_bytes: int
    placement: Placement
    stacks: tuple[str, ...]
    pause_s: float = 0.0
    busy: bool = False

    def title(self) -> str:
        """Name the case for people."""
        rhythm = f", after {self.pause_s * 1e3:.0f} ms of rest" if self.pause_s else ""
        busy = ", a thread of the node holds the interpreter's lock" if self.busy else ""
        return f"{self.num_bytes:,} B each way, {self.placement}{rhythm}{busy}"

    def effort(self, run: Run) -> tuple[int, int]:
        """Give the number of rounds, and of requests in each."""
        if self.num_bytes >= LONG_BYTES:
            return run.rounds(5), 1
        if self.pause_s:
            return run.rounds(12), max(_FEWEST, 8 // run.divisor)
        if self.num_bytes > _SMALL_BYTES:
            return run.rounds(12), _FEWEST
        return run.rounds(20), max(_FEWEST, 100 // run.divisor)


def shape_of(num_bytes: int) -> tuple[int, int, int]:
    """Give the shape of bfloat16 hidden states with so many bytes.

    Raises:
        ConfigError: there is none of at most 16384 columns.
    """
    numbers, odd = divmod(num_bytes, 2)
    if not odd and 0 < numbers <= _WIDEST:
        return (1, 1, numbers)
    if not odd and numbers > 0 and numbers % _WIDEST == 0 and num_bytes <= 256 << 20:
        return (1, numbers // _WIDEST, _WIDEST)
    raise ConfigError(
        f"--sizes: {num_bytes}; expected an even number up to 32768, or a multiple of 32768"
        " up to 256 MiB",
        field="--sizes",
    )


def plan_cases(plan: WirePlan, stacks: tuple[str, ...], default: Placement) -> list[WireCase]:
    """List the cases of a plan.

    Args:
        plan: what to compare.
        stacks: those of the plan that can be measured here.
        default: placement of a plan that names none.
    """
    placement = plan.placement or default
    cases = [WireCase("results", size, placement, stacks) for size in plan.sizes]
    if not plan.extras:
        return cases
    small = [case for case in cases if case.num_bytes <= _SMALL_BYTES]
    if placement is Placement.TWO:
        cases += [replace(case, section="one_core", placement=Placement.ONE) for case in small]
    cases += [replace(case, section="idle", pause_s=_PAUSE_S) for case in small]
    # The busy thread needs a core: pinned, the node would share one with it.
    cases += [
        replace(
            case,
            section="busy_node",
            placement=Placement.FREE,
            stacks=(RAW, OURS, OURS_AIO),
            busy=True,
        )
        for case in small[-1:]
    ]
    return cases
