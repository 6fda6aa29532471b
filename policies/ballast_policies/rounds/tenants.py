"""Tenant limits: which jobs of each namespace take part in a decision, and with how many GPUs.

Jobs of a tenant are admitted first come, first served while its limits have room; what runs is never stopped
for a limit. The others wait outside the allocation problem, so that the jobs in it can never exceed a limit,
whatever policy and round decide, and a tenant that floods the queue costs the others nothing. O(jobs).
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence


class TenantLimit(enum.StrEnum):
    """The limits, by the name of their field."""

    GPUS = "maxGpus"
    GPUS_BY_TYPE = "maxGpusByType"
    RUNNING_JOBS = "maxRunningJobs"
    WAITING_JOBS = "maxWaitingJobs"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None: no limit.

    Attributes:
        gpus: GPUs that its jobs may hold at a time.
        running_jobs: jobs that may hold GPUs at a time.
        waiting_jobs: waiting jobs that take part in the allocation, the oldest ones.
    """

    gpus: int | None = None
    running_jobs: int | None = None
    waiting_jobs: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantJob:
    """A job that wants GPUs.

    Attributes:
        sizes: GPUs that its gang may have, most first; of a running gang only its size counts, the first.
        running: it holds its GPUs and is to keep them.
        held: GPUs that its pods have now; those of an ended launch too, until the pods are gone.
    """

    name: str
    tenant: str
    sizes: tuple[int, ...]
    running: bool = False
    held: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantAdmission:
    """Jobs that take part in the decision, and the limits that keep others out.

    Attributes:
        sizes: job -> GPUs of its gang, for jobs that take part.
        over: job -> limit that keeps it out.
        never: those of ``over`` whose smallest gang exceeds the limit by itself.
        room: tenant -> GPUs that its running gangs may grow by, for tenants with a limit on GPUs.
    """

    sizes: Mapping[str, int]
    over: Mapping[str, TenantLimit]
    never: frozenset[str]
    room: Mapping[str, int]


@dataclasses.dataclass(slots=True)
class _Left:
    """Rest of a tenant's limits; None: any number."""

    gpus: int | None
    running_jobs: int | None
    waiting_jobs: int | None
    closed_by: TenantLimit | None = None


def admit_by_tenant(
    jobs: Sequence[TenantJob],
    limits: Callable[[str], TenantLimits],
    *,
    held_by_others: Mapping[str, int] | None = None,
) -> TenantAdmission:
    """Jobs of ``jobs``, in order of arrival, that take part.

    A waiting job that a limit keeps out also keeps out the younger ones of its tenant, so that small gangs do
    not overtake a large one without end; one that alone exceeds the limit does not. Where the limit leaves
    less room than the largest gang, the gang is as large as the room allows.

    Args:
        jobs: those that want GPUs.
        limits: of a tenant.
        held_by_others: tenant -> GPUs held by jobs that want none, e.g. until a suspended one has saved.
    """
    held = Counter(held_by_others or {})
    running: Counter[str] = Counter()
    for job in jobs:
        held[job.tenant] += max(job.sizes[0], job.held) if job.running else job.held
        running[job.tenant] += job.running
    left: dict[str, _Left] = {}
    most: dict[str, int | None] = {}
    for tenant in {job.tenant for job in jobs}:
        limit = limits(tenant)
        most[tenant] = limit.gpus
        left[tenant] = _Left(
            gpus=None if limit.gpus is None else limit.gpus - held[tenant],
            running_jobs=None if limit.running_jobs is None else limit.running_jobs - running[tenant],
            waiting_jobs=limit.waiting_jobs,
        )
    sizes: dict[str, int] = {}
    over: dict[str, TenantLimit] = {}
    never: set[str] = set()
    for job in jobs:
        if job.running:
            sizes[job.name] = job.sizes[0]
            continue
        gpus = most[job.tenant]
        if gpus is not None and job.sizes[-1] > gpus:
            over[job.name] = TenantLimit.GPUS
            never.add(job.name)
            continue
        admitted = _admit(job, left[job.tenant])
        if isinstance(admitted, TenantLimit):
            over[job.name] = admitted
        else:
            sizes[job.name] = admitted
    room = {tenant: max(0, one.gpus) for tenant, one in left.items() if one.gpus is not None}
    return TenantAdmission(sizes=sizes, over=over, never=frozenset(never), room=room)


def _admit(job: TenantJob, left: _Left) -> int | TenantLimit:
    """GPUs of the gang, taken from what is left; or the limit that keeps it out."""
    if left.waiting_jobs == 0:
        return TenantLimit.WAITING_JOBS
    if left.closed_by is None and left.running_jobs is not None and left.running_jobs <= 0:
        left.closed_by = TenantLimit.RUNNING_JOBS
    if left.closed_by is not None:
        return left.closed_by
    size = job.sizes[0]
    if left.gpus is not None:
        # Its own pods of an earlier launch are gone before it is launched again.
        room = left.gpus + job.held
        fitting = next((one for one in job.sizes if one <= room), None)
        if fitting is None:
            left.closed_by = TenantLimit.GPUS
            return left.closed_by
        size = fitting
        left.gpus = room - max(size, job.held)
    if left.running_jobs is not None:
        left.running_jobs -= 1
    if left.waiting_jobs is not None:
        left.waiting_jobs -= 1
    return size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TypedGang:
    """A gang that takes part, of tenants with limits by GPU type.

    Attributes:
        tenants: whose limits hold for it, as its namespace, its team, and the team that this is inside.
        sizes: GPUs that it may have, fewest first.
        held: GPU type -> its GPUs now, those of an ended launch too.
        runs_on: types on which it runs and stays unless it is moved.
    """

    name: str
    tenants: tuple[str, ...]
    sizes: tuple[int, ...]
    types: tuple[str, ...]
    held: Mapping[str, int] = dataclasses.field(default_factory=dict)
    runs_on: frozenset[str] = frozenset()


def most_by_type(
    gangs: Sequence[TypedGang],
    limits: Mapping[str, Mapping[str, int]],
    held_by_others: Mapping[str, Mapping[str, int]],
) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Gang -> GPU type -> most GPUs that it may have there, so that no choice of types exceeds a limit.

    Each gang counts on every limited type that it may use: first where it runs, then the least sizes of those
    that wait, oldest first, of running ones that could move there, and then what they may grow by. A waiting
    gang that gets no type keeps the types that it waits for from the younger ones of the tenants in its way.

    Args:
        gangs: in order of arrival.
        limits: tenant -> GPU type -> GPUs that its jobs may hold; absent: no limit.
        held_by_others: tenant -> GPU type -> GPUs held by jobs that are not among them.

    Returns:
        that, and of each gang that gets no type a tenant that has no room for it.
    """
    left = {
        (tenant, gpu_type): most - held_by_others.get(tenant, {}).get(gpu_type, 0)
        for tenant, by_type in limits.items()
        for gpu_type, most in by_type.items()
    }

    def limiting(gang: TypedGang, gpu_type: str) -> list[tuple[str, str]]:
        return [key for tenant in gang.tenants if (key := (tenant, gpu_type)) in left]

    for gang in gangs:
        for gpu_type, count in gang.held.items():
            for key in limiting(gang, gpu_type):
                left[key] -= count
    found: dict[str, dict[str, int]] = {}
    without: dict[str, str] = {}
    waited_for: set[tuple[str, str]] = set()
    for gang in sorted(gangs, key=lambda gang: bool(gang.runs_on)):
        least, most, in_the_way = gang.sizes[0], dict[str, int](), list[tuple[str, str]]()
        for gpu_type in gang.types:
            keys, more = limiting(gang, gpu_type), least - gang.held.get(gpu_type, 0)
            full = [key for key in keys if more > left[key] or (key in waited_for and not gang.runs_on)]
            if not keys:
                most[gpu_type] = gang.sizes[-1]
            elif gpu_type in gang.runs_on:
                most[gpu_type] = max(gang.held.get(gpu_type, 0), least)
            elif not full:
                for key in keys:
                    left[key] -= max(0, more)
                most[gpu_type] = least
            else:
                without.setdefault(gang.name, full[0][0])
                if all(least <= limits[tenant][gpu_type] for tenant, _ in keys):
                    in_the_way += full
        if not most:
            waited_for.update(in_the_way)
        found[gang.name] = most
    for gang in gangs:
        for gpu_type, most_there in found[gang.name].items():
            if (keys := limiting(gang, gpu_type)) and most_there < gang.sizes[-1]:
                more = max(0, min(gang.sizes[-1] - most_there, *(left[key] for key in keys)))
                for key in keys:
                    left[key] -= more
                found[gang.name][gpu_type] += more
    return found, {name: tenant for name, tenant in without.items() if not found[name]}
