"""A short episode with everything a process; longer ones: ``make chaos ARGS=--real``."""

import pytest

from tests.chaos.faults import Fault
from tests.chaos.processes import hostile
from tests.chaos.processes.play import play

SHORT = (
    "trainer killed",
    "trainer says NaN",
    "leader killed",
    "quota is full",
    "half of the requests answered by 500",
    "node agent killed",
    "watches stalled",
    "API server killed",
    "pod deleted by someone",
)
"""One of each family."""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_faults_of_processes_cost_no_job_and_no_step(tmp_path):
    """Every job succeeds, from its newest checkpoint after each fault; never two launches of one at once."""
    faults = [Fault(kind, number=30 + place, ticks=3) for place, kind in enumerate(SHORT)]
    deep = list(hostile.SPECS).index("very deep nesting")
    faults.insert(2, Fault("hostile TrainingJob", number=deep, ticks=1))
    outcome = play(faults, tmp_path, steps=60, at_once=3)
    assert outcome.problems == ()
    assert outcome.jobs >= 3
    assert outcome.looks > 0
    assert {
        "trainer killed",
        "leader killed",
        "node agent killed",
        "API server killed",
    } <= outcome.applied.keys()
