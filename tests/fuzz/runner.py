"""Runs targets, each in a process of its own, and tells what came of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.seeds import FOLDER as SEEDS

__all__ = ["FINDINGS", "MAX_INPUT_BYTES", "MAX_MEMORY_MB", "MAX_SECONDS", "Outcome", "run_target"]

ROOT: Final = Path(__file__).parents[2]
FOUND: Final = Path(__file__).parent / "found"
"""Inputs that once were findings, by target."""
FINDINGS: Final = ROOT / ".fuzz"
MAX_INPUT_BYTES: Final = 4096
MAX_SECONDS: Final = 10
"""An input that takes longer is a finding; ordinary ones take less than a millisecond."""
MAX_MEMORY_MB: Final = 512
"""Resident memory past which a target's process is a finding."""

_STAT: Final = re.compile(r"stat::(\w+):\s+([0-9]+)")
_PROGRESS: Final = re.compile(r"#[0-9]+\s+(NEW|REDUCE|pulse)")
_RSS: Final = re.compile(r"INITED .* rss: ([0-9]+)Mb")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of one target gave.

    Attributes:
        target: its name.
        executions: inputs tried.
        seconds: wall time, without the start of the process.
        start_mb: resident memory when the seeds had run.
        peak_mb: greatest resident memory.
        finding: file with the input at fault; None where there was none.
        output: the fuzzer's last lines.
    """

    target: str
    executions: int
    seconds: float
    start_mb: int
    peak_mb: int
    finding: Path | None
    output: str
    returncode: int

    @property
    def good(self) -> bool:
        return self.returncode == 0 and self.finding is None


def run_target(
    target: str,
    *,
    runs: int | None = None,
    seconds: int | None = None,
    findings: Path = FINDINGS,
    package: str = "tests.fuzz.targets",
) -> Outcome:
    """Fuzz one target for `runs` executions or `seconds`; its findings are kept in a folder."""
    findings.mkdir(parents=True, exist_ok=True)
    before = set(findings.iterdir())
    with tempfile.TemporaryDirectory() as corpus:
        arguments = [
            f"-max_len={MAX_INPUT_BYTES}",
            f"-timeout={MAX_SECONDS}",
            f"-rss_limit_mb={MAX_MEMORY_MB}",
            f"-artifact_prefix={findings}/{target}-",
            "-print_final_stats=1",
            "-verbosity=1",
            corpus,
            *(str(folder / target) for folder in (SEEDS, FOUND) if (folder / target).is_dir()),
        ]
        if runs is not None:
            arguments.append(f"-runs={runs}")
        if seconds is not None:
            arguments.append(f"-max_total_time={seconds}")
        words = _dictionary(target)
        if words is not None:
            arguments.append(f"-dict={words}")
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.fuzzer", f"{package}.{target}", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        elapsed_s = time.monotonic() - started
    stats = {name: int(value) for name, value in _STAT.findall(done.stdout)}
    initial = _RSS.search(done.stdout)
    new = sorted(set(findings.iterdir()) - before)
    return Outcome(
        target=target,
        executions=stats.get("number_of_executed_units", 0),
        seconds=elapsed_s,
        start_mb=int(initial[1]) if initial else 0,
        peak_mb=stats.get("peak_rss_mb", 0),
        finding=new[0] if new else None,
        output="\n".join(
            line for line in done.stdout.splitlines() if _PROGRESS.match(line) is None
        )[-4000:],
        returncode=done.returncode,
    )


def _dictionary(target: str) -> Path | None:
    path = Path(__file__).parent / "words" / f"{target}.dict"
    return path if path.is_file() else None
