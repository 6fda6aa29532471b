"""The ClusterPolicy's tenant limits on the jobs of a snapshot, and what the jobs kept out are told."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from ballast_policies.rounds.tenants import (
    TenantJob,
    TenantLimit,
    TenantLimits,
    admit_by_tenant,
)

from ballast_operator.allocator.problem.gang_size import Refusal
from ballast_operator.api.cluster_policy import Tenants
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import Key, job_id
from ballast_operator.views.job import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """The outcome.

    Attributes:
        gpus: job -> size of its gang, for jobs that take part in the allocation.
        refused: job -> why it does not.
        room: namespace -> GPUs that its gangs may still grow by, for namespaces with a limit; used up by
            :meth:`growth`.
    """

    gpus: Mapping[Key, int]
    refused: Mapping[Key, Refusal]
    room: dict[str, int]

    def growth(self, key: Key, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the sizes that the job's namespace has room for; that room is not offered again."""
        left = self.room.get(key[0])
        if left is None:
            return sizes
        found = tuple(size for size in sizes if size - self.gpus[key] <= left)
        if found:
            self.room[key[0]] = left - (max(found) - self.gpus[key])
        return found


def admit_tenants(
    tenants: Tenants, admitted: Sequence[tuple[JobView, int]], jobs: Sequence[JobView]
) -> Tenancy:
    """Which of the ``admitted`` (job, size of its gang) take part, by age; ``jobs``: all there are."""
    limited = tenants.each_namespace.max_gpus is not None or any(
        own.max_gpus is not None for own in tenants.namespaces.values()
    )
    wanting = {view.key for view, _ in admitted}
    others: Counter[str] = Counter()
    for view in jobs:
        if view.key not in wanting:
            others[view.key[0]] += _held(view)
    asked = [
        TenantJob(
            name=job_id(view.key),
            tenant=view.key[0],
            sizes=_sizes(view, gpus) if limited else (gpus,),
            running=view.running_allocation is not None,
            held=_held(view),
        )
        for view, gpus in admitted
    ]
    found = admit_by_tenant(asked, lambda namespace: limits_of(tenants, namespace), held_by_others=others)
    by_name = {job_id(view.key): view.key for view, _ in admitted}
    smallest = {job.name: job.sizes[-1] for job in asked}
    return Tenancy(
        gpus={by_name[name]: gpus for name, gpus in found.sizes.items()},
        refused={
            by_name[name]: _refusal(
                tenants, by_name[name][0], limit, gpus=smallest[name], never=name in found.never
            )
            for name, limit in found.over.items()
        },
        room=dict(found.room),
    )


def limits_of(tenants: Tenants, namespace: str) -> TenantLimits:
    """The namespace's own limits, and those of every namespace where it has none."""
    values = _limits(tenants, namespace)
    return TenantLimits(
        gpus=values.get(TenantLimit.GPUS),
        running_jobs=values.get(TenantLimit.RUNNING_JOBS),
        waiting_jobs=values.get(TenantLimit.WAITING_JOBS),
    )


def _limits(tenants: Tenants, namespace: str) -> dict[str, int]:
    """Field -> limit, for those that there are."""
    own = tenants.namespaces.get(namespace)
    return {**tenants.each_namespace.to_dict(), **(own.to_dict() if own is not None else {})}


def _held(view: JobView) -> int:
    allocation = view.status.allocation
    return 0 if allocation is None else allocation.gpus


def _sizes(view: JobView, gpus: int) -> tuple[int, ...]:
    """Sizes that the gang may be launched with, ``gpus`` at most, most first."""
    spec = view.spec
    assert spec is not None
    if view.running_allocation is not None:
        return (gpus,)
    smaller = range(gpus - 1, max(1, spec.smallest_gang) - 1, -1)
    return (gpus, *(size for size in smaller if spec.suits(size)))


def _refusal(tenants: Tenants, namespace: str, limit: TenantLimit, *, gpus: int, never: bool) -> Refusal:
    """The same for all that wait for the limit, and unchanged while the queue moves: no write for a move."""
    own = tenants.namespaces.get(namespace)
    part = f"namespaces.{namespace}" if own is not None and limit in own.to_dict() else "eachNamespace"
    bound = _limits(tenants, namespace)[limit]
    raise_it = f"ask the cluster's administrator to raise tenants.{part}.{limit}={bound} of the ClusterPolicy"
    if never:
        message = (
            f"needs {gpus} GPUs at least, and the jobs of namespace {namespace} may hold {bound} at a time. "
            f"To fix: lower pipeline.minStages, or {raise_it}"
        )
    elif limit is TenantLimit.WAITING_JOBS:
        message = (
            f"the {bound} oldest waiting jobs of namespace {namespace} take part in the allocation, and this "
            f"one is younger. To fix: wait, delete older ones, or {raise_it}"
        )
    else:
        what = "GPUs" if limit is TenantLimit.GPUS else "jobs with GPUs"
        message = (
            f"namespace {namespace} may have {bound} {what} at a time, and its older jobs run or come first. "
            f"To fix: wait, or {raise_it}"
        )
    return Refusal(reason=JobReason.NAMESPACE_LIMIT, message=message)
