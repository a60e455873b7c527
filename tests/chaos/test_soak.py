"""A short soak; ``python -m tests.chaos soak`` runs 10,000 sessions."""

from __future__ import annotations

import pytest

from tests.chaos.soak import SoakPlan, soak


@pytest.mark.timeout(300)
async def test_every_session_is_given_back_also_those_that_were_abandoned(tmp_path):
    plan = SoakPlan(sessions=600, samples=12)
    report = await soak(plan, tmp_path)
    print(report.describe())
    assert report.wrong == []
    assert report.ends["finished"] == plan.sessions / 2
    assert sum(report.ends.values()) == plan.sessions
    assert report.ends["never released"] > 50
    assert report.peak["reserved_tokens"] > 0
    assert report.after == report.before
    assert set(report.after.values()) == {0.0}
