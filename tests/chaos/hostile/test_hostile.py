"""A short run with hostile objects on a real API server; longer ones: ``python -m tests.chaos.hostile``."""

import pytest

from tests.chaos.hostile.kinds import KINDS
from tests.chaos.hostile.play import play

SLOWEST_SECONDS = 10.0
"""On a machine that runs other tests as well; half a second in a run of its own."""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_hostile_objects_cost_no_job_and_nothing_of_others(tmp_path):
    """One of each kind: the operator lives, answers each, and ordinary jobs run to their end."""
    outcome = play(7, len(KINDS), tmp_path, slowest_seconds=SLOWEST_SECONDS)
    assert outcome.problems == ()
    assert (outcome.taken + outcome.refused).keys() >= {"Node", "ClusterPolicy"}
