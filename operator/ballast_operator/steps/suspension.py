"""How long a job was suspended by its owner: time that no policy owes it."""

import dataclasses

from ballast_operator.steps.outcome import Situation, seconds_since
from ballast_operator.views.status import JobStatus


def clocked(situation: Situation, status: JobStatus) -> JobStatus:
    """The status with the clock of ``spec.suspend`` started or stopped."""
    since = status.suspended_since
    if situation.spec.suspend:
        return status if since is not None else dataclasses.replace(status, suspended_since=situation.now)
    if since is None:
        return status
    seconds = status.suspended_seconds + max(0.0, seconds_since(situation, since))
    return dataclasses.replace(status, suspended_since=None, suspended_seconds=seconds)
