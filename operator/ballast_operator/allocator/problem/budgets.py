"""Jobs of teams that have spent their budget take no part in the allocation."""

import dataclasses
from collections.abc import Mapping, Sequence

from ballast_operator.allocator.problem.admission import RefusedJob
from ballast_operator.allocator.problem.gang_size import Refusal
from ballast_operator.api.conditions import JobReason
from ballast_operator.views.job import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpentBudget:
    """A team has spent its budget.

    Attributes:
        message: which, and what to change.
        suspends: its jobs hold no GPUs until there is budget again.
    """

    message: str
    suspends: bool


def without_suspended_teams(
    wanting: Sequence[JobView], spent: Mapping[str, SpentBudget]
) -> tuple[list[JobView], list[RefusedJob]]:
    """(jobs that may take part, jobs that may not)."""
    kept, refused = [], []
    for view in wanting:
        over = spent.get(view.spec.entity or "") if view.spec is not None else None
        if over is None or not over.suspends:
            kept.append(view)
            continue
        refusal = Refusal(reason=JobReason.TEAM_BUDGET_SPENT, message=over.message)
        refused.append(RefusedJob(key=view.key, launches=view.status.launches, refusal=refusal))
    return kept, refused
