"""Conditions that only the allocator can know, taken from its wish."""

import dataclasses

from ballast_operator.api.conditions import JobCondition
from ballast_operator.steps.outcome import Situation, say
from ballast_operator.views.status import JobStatus

ADVISED = (JobCondition.INFORMED, JobCondition.ON_TIME)


def advised(situation: Situation) -> JobStatus:
    """The status with the allocator's word on the job's fields; unchanged before it has spoken."""
    status, wish = situation.view.status, situation.wish
    if wish is None:
        return status
    said = {advice.type for advice in wish.advice}
    kept = tuple(c for c in status.conditions if c.type not in ADVISED or c.type in said)
    status = dataclasses.replace(status, conditions=kept)
    for advice in wish.advice:
        status = say(situation, status, advice.type, advice.value, advice.reason, advice.message)
    return status
