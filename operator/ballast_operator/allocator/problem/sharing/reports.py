"""Under which name a report is kept: the speed of a job beside another is not its speed alone."""

from collections.abc import Sequence

from ballast_policies.throughput.paired import paired_name

from ballast_operator.allocator.problem.speeds.kinds import kind_of
from ballast_operator.api.conditions import JobCondition
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView

ALONE = ""
"""In place of a kind: the job has its GPU for itself."""


def partners_by_job(jobs: Sequence[JobView]) -> dict[Key, str | None]:
    """Job on a GPU that may be shared -> kind of the job that trains beside it.

    :data:`ALONE` where none is there; None where one is there and does not train: it starts or ends, and a
    speed that is measured meanwhile is neither.
    """
    on_node: dict[str, list[JobView]] = {}
    for view in jobs:
        allocation = view.status.allocation
        if allocation is not None and allocation.shared_gpu is not None and allocation.pays:
            on_node.setdefault(allocation.nodes[0], []).append(view)
    found: dict[Key, str | None] = {}
    for there in on_node.values():
        for view in there:
            others = [other for other in there if other.key != view.key]
            found[view.key] = _beside(others)
    return found


def _beside(others: Sequence[JobView]) -> str | None:
    if not others:
        return ALONE
    if len(others) > 1 or others[0].spec is None or others[0].running_allocation is None:
        return None
    return kind_of(others[0].spec) if others[0].status.is_true(JobCondition.RUNNING) else None


class Partners:
    """Who trains beside whom, from decision to decision."""

    def __init__(self) -> None:
        self._now: dict[Key, tuple[int, str | None]] = {}
        self._new: set[Key] = set()
        self._mixed: set[Key] = set()

    def look(self, jobs: Sequence[JobView]) -> None:
        """Take in who is where now, before the reports that have come since the last time."""
        before = self._now
        found = partners_by_job(jobs)
        self._now = {view.key: (view.launch, found[view.key]) for view in jobs if view.key in found}
        changed = {key for key, now in self._now.items() if before.get(key) != now}
        # A launch that is alone has nothing before it that its reports could be of.
        changed -= {
            key
            for key in changed
            if self._now[key][1] == ALONE and before.get(key, (0, None))[0] != self._now[key][0]
        }
        self._mixed = (self._mixed | self._new) & self._now.keys() - changed
        self._new = changed

    def name(self, view: JobView, alone: str) -> str | None:
        """Under which name the job's newest report is kept; None: under none. ``alone``: where it is alone.

        Reports that have come before it was seen that a partner has come or gone, and the first one after
        them, may be of the time before.
        """
        allocation = view.status.allocation
        if allocation is None or allocation.shared_gpu is None:
            return alone
        launch, partner = self._now.get(view.key, (0, None))
        if partner is None or launch != allocation.launch or view.key in self._new:
            return None
        if view.key in self._mixed:
            self._mixed.discard(view.key)
            return None
        return paired_name(alone, partner) if partner else alone
