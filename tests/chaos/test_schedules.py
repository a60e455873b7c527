"""A short set of schedules; ``make chaos`` runs many more."""

from __future__ import annotations

import pytest

from tests.chaos.model import NUM_REQUESTS, NUM_TOKENS
from tests.chaos.run import run_schedule
from tests.chaos.schedule import CI_SEEDS, Fault, Kind, Schedule, make_schedule


def test_a_seed_gives_the_same_schedule_each_time():
    for seed in range(50):
        made = [make_schedule(seed, num_requests=8, num_tokens=60) for _ in range(2)]
        assert made[0] == made[1]
        assert str(made[0]).startswith(f"seed {seed}, ")


def test_the_short_set_holds_every_kind_of_fault():
    schedules = [
        make_schedule(seed, num_requests=NUM_REQUESTS, num_tokens=NUM_TOKENS) for seed in CI_SEEDS
    ]
    assert {fault.kind for made in schedules for fault in made.faults} == set(Kind)


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", CI_SEEDS)
async def test_texts_stay_whole_and_nothing_is_left_behind(place, seed: int):
    schedule = make_schedule(seed, num_requests=NUM_REQUESTS, num_tokens=NUM_TOKENS)
    print(f"{schedule}; again: python -m tests.chaos --seed {seed}")
    outcome = await run_schedule(place.mesh, schedule, place.requests)
    print("\n".join(outcome.log))
    assert outcome.wrong == []


def hit(kind: Kind, stage: int, after: int, for_s: float = 0.0) -> Fault:
    return Fault(kind, 0, after, stage, busy=True, for_s=for_s, amount=0)


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stage", range(3))
async def test_a_session_waits_for_cache_where_the_node_that_takes_over_is_full(place, stage: int):
    faults = (hit(Kind.FULL, stage, 5, for_s=3.0), hit(Kind.KILL, stage, 12))
    outcome = await run_schedule(place.mesh, Schedule(0, (7,), (0.0,), faults), place.requests)
    print("\n".join(outcome.log))
    assert outcome.wrong == []


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stage", range(3))
async def test_the_nodes_around_a_killed_one_are_freed_at_once(place, stage: int):
    faults = (hit(Kind.KILL, stage, 12),)
    schedule = Schedule(0, (7,), (0.0,), faults)
    outcome = await run_schedule(place.mesh, schedule, place.requests)
    print("\n".join(outcome.log))
    assert outcome.wrong == []
    assert not [line for line in outcome.log if "was idle for too long" in line]
