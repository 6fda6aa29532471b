"""Which new status of a job asks for a decision, and how soon."""

import datetime

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.observation.status_changes import asks_or_frees, begins_to_run

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def running(value: bool) -> TrainingJobStatus:
    reason = JobReason.ALL_RANKS_TRAIN if value else JobReason.NOT_ADMITTED
    return TrainingJobStatus().with_condition(JobCondition.RUNNING, value, reason, "", now=NOW, generation=1)


def test_a_gang_that_begins_to_run_frees_nothing() -> None:
    """A decision on it may wait for others; one that has stopped has GPUs to give."""
    assert begins_to_run(running(False), running(True))
    assert not asks_or_frees(running(False), running(True))
    assert asks_or_frees(running(True), running(False))
    assert not begins_to_run(running(True), running(True))
