"""What a job has cost so far: GPUs x hours x price, from the launch's intent to its last pod's end."""

import dataclasses

from ballast_policies.accounting import cost

from ballast_operator.steps.outcome import Situation, seconds_since
from ballast_operator.views.status import JobStatus


def accrue(situation: Situation, status: JobStatus) -> JobStatus:
    """The status with the cost of the gang it holds brought up to now; call before the gang changes."""
    held = status.held
    if held is None or situation.price_per_hour <= 0:
        return status
    since = status.cost_at if status.cost_at is not None and status.cost_at > held.since else held.since
    gpu_seconds = max(0.0, seconds_since(situation, since)) * len(held.slots)
    total = status.cost + cost(gpu_seconds, situation.price_per_hour)
    return dataclasses.replace(status, cost=total, cost_at=situation.now)
