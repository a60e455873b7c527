"""The adaptive choice against every fixed one, on real sockets over links of set bandwidth."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

from meshnet.cli.bench.report import Report, Run, Table
from tests.bench.shaped import CONTENDERS

_WIDTHS = (576, 4096)
_LINKS = {
    "100 Mbit/s": ((100, 40),),
    "1 Gbit/s": ((1000, 200),),
    "10 Gbit/s": ((10_000, 400),),
    "flips, 100 Mbit/s and 10 Gbit/s": ((10_000, 60), (100, 20)) * 3,
    "flips, 1 and 10 Gbit/s": ((10_000, 60), (1000, 60)) * 3,
}
_MARGIN = 0.03
_MARGIN_S = 50e-6


async def run(options: Run) -> Report:
    """Measure every link."""
    namespace = _namespace()
    how = "tbf in a network namespace" if namespace else "TCP's own pacing (no namespace allowed)"
    report = Report(f"adaptive: encodings on links shaped with {how}", _NOTES)
    for width in _WIDTHS:
        table = Table(
            f"chunks of 128 tokens, {width} wide: ms a body, encoding and decoding included",
            ("link", *CONTENDERS, "best", "/ best", "more by", "within", "in all"),
        )
        report.tables.append(table)
        for link, phases in _LINKS.items():
            rates = ",".join(f"{rate}x{max(2, count // options.divisor)}" for rate, count in phases)
            found = _measure(namespace, ["--rates", rates, "--width", str(width)])
            _add_row(table, link, width, found)
    return report


def _namespace() -> list[str]:
    """Give the command that runs another where loopback may be shaped; none if not allowed."""
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        return []
    for command in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        trial = [*command, sys.executable, "-m", "tests.bench.shaped", "--trial"]
        if subprocess.run(trial, capture_output=True).returncode == 0:
            return command
    return []


def _measure(namespace: list[str], arguments: list[str]) -> dict[str, Any]:
    command = [*namespace, sys.executable, "-m", "tests.bench.shaped", *arguments]
    if namespace:
        command.append("--namespace")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{command} ended with exit code {done.returncode}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def within(adaptive_s: float, best_s: float, count: int) -> bool:
    """Tell whether `count` bodies took at most 3 % or 50 microseconds each over the best."""
    return adaptive_s <= max(best_s * (1 + _MARGIN), best_s + count * _MARGIN_S)


def _add_row(table: Table, link: str, width: int, found: dict[str, Any]) -> None:
    times, totals, count = found["typical_s"], found["total_s"], found["bodies"]
    fixed = {name: times[name] for name in CONTENDERS if name != "adaptive"}
    best = min(fixed, key=fixed.__getitem__)
    more_s = (times["adaptive"] - times[best]) / count
    in_all = totals["adaptive"] / min(totals[name] for name in fixed)
    good = within(times["adaptive"], times[best], count)
    table.rows.append(
        (
            link,
            *(f"{times[name] / count * 1e3:.2f}" for name in CONTENDERS),
            best,
            f"{times['adaptive'] / times[best]:.3f}",
            f"{more_s * 1e6:+.0f} us",
            "yes" if good else "NO",
            f"{in_all:.3f}",
        )
    )
    table.data.append(
        {
            "link": link,
            "width": width,
            **found,
            "best_fixed": best,
            "adaptive_over_best": times["adaptive"] / times[best],
            "adaptive_more_s": more_s,
            "within": good,
            "adaptive_over_best_in_all": in_all,
        }
    )


_NOTES = (
    (
        "Every body is sent once by each contender, in any order, and waited for; all see the"
        " same link. The fixed ones are the manual mode."
    ),
    (
        "within: the adaptive choice took at most 3 % or 50 us a body more than the fixed choice"
        " that turned out best, by the medians at each bandwidth. in all: by the sums, in which"
        " other programs count too."
    ),
)
