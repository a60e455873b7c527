"""Seeds are those of the vectors, every target takes them, a short run of fuzzing finds nothing.

Mutated bytes without coverage run where atheris has no wheel, too.
"""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.runner import FOUND, ROOT, run_target
from tests.fuzz.seeds import FOLDER, make_seeds
from tests.fuzz.targets import TARGETS

RANDOM_INPUTS = 400


def test_seeds_are_those_that_the_vectors_make() -> None:
    """``python -m tests.fuzz.seeds`` writes them; those of new vectors are used before that."""
    made = make_seeds()
    assert set(made) == set(TARGETS)
    for target, seeds in made.items():
        there = {path.name: path.read_bytes() for path in (FOLDER / target).iterdir()}
        assert there.items() <= seeds.items(), f"{target}: run python -m tests.fuzz.seeds"
        assert there


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_what_is_near_them(target: str) -> None:
    check = importlib.import_module(f"tests.fuzz.targets.{target}").check
    found = [path.read_bytes() for path in sorted((FOUND / target).glob("*"))]
    seeds = [*make_seeds()[target].values(), *found]
    for seed in seeds:
        check(seed)
    rng = random.Random(target)
    for _ in range(RANDOM_INPUTS):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        check(bytes(data))


def test_twenty_seconds_of_fuzzing_find_nothing() -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this system")
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "20", "--jobs", "2"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(target in done.stdout for target in TARGETS)


def test_a_finding_is_kept_and_named(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this system")
    outcome = run_target("broken", runs=10_000, findings=tmp_path, package="tests.fuzz")
    assert not outcome.good
    assert outcome.finding is not None
    assert outcome.finding.read_bytes().startswith(b"x")
    assert "ZeroDivisionError" in outcome.output
