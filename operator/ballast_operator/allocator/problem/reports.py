"""Reports of trainers, as measurements of their jobs: of which gang each was made, and who shared its GPU."""

from collections.abc import Sequence

from ballast_policies.contract import Plan
from ballast_policies.contract.limits import LEAST_RATE, MOST_RATE
from ballast_policies.scheduling.measurements import Measurements
from ballast_policies.throughput.speeds import SpeedKey

from ballast_operator.api.conditions import JobCondition
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView


def record(view: JobView, measurements: Measurements, partners: "Partners | None" = None) -> None:
    """Add the job's newest report, once; ``partners``: None: no GPU is shared."""
    allocation, lease, plan = view.status.allocation, view.lease, view.launched_plan
    if allocation is None or lease is None or lease.report is None or not view.acknowledged:
        return
    if not view.as_planned:
        return  # its planner was changed since, and says other degrees for these GPUs
    report, spec = lease.report, view.spec
    if plan is None or report.epoch != plan.epoch or spec is None:
        return
    measurements.profiles.record(view.key, spec, report, several_pools=bool(allocation.parts))
    rate = report.steps_per_second
    if rate is None or not LEAST_RATE <= rate <= MOST_RATE:
        return
    if measurements.knows(view.key, allocation.launch, report.step):
        return
    alone = measured_on(allocation, plan)
    where = alone if partners is None else partners.beside(view, alone)
    measurements.record(view.key, spec, allocation.launch, report, where)


def measured_on(allocation: JobAllocation, plan: Plan) -> SpeedKey:
    """Key of the place in which the gang of ``plan`` runs."""
    if allocation.parts:
        return SpeedKey.of_types((allocation.part_of(rank.pod).gpu_type, 1) for rank in plan.ranks)
    node_of = allocation.node_of
    nodes = len({node_of[pod] for pod in plan.pods if pod in node_of})
    return SpeedKey.of(allocation.gpu_type, len(plan.ranks), nodes)


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
    return others[0].spec.kind if others[0].status.is_true(JobCondition.RUNNING) else None


class Partners:
    """Partners on shared GPUs, from decision to decision: a job's speed there is not its speed alone."""

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

    def beside(self, view: JobView, alone: SpeedKey) -> SpeedKey | None:
        """Key of the job's newest report; None: not known. ``alone``: its key where it has no partner.

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
        return alone._replace(partner=partner)
