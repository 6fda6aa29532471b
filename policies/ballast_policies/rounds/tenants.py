"""Tenant limits: which jobs of each tenant take part in a decision, and with how many GPUs.

Jobs of a tenant are admitted first come, first served while its limits have room; what runs is never stopped
for a limit. The others wait outside the allocation problem, so that the jobs in it can never exceed a limit,
whatever policy and round decide, and a tenant that floods the queue costs the others nothing. O(jobs).
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class LimitField(enum.StrEnum):
    """The limits, by the name of their field."""

    GPUS = "maxGpus"
    GPUS_BY_TYPE = "maxGpusByType"
    RUNNING_JOBS = "maxRunningJobs"
    WAITING_JOBS = "maxWaitingJobs"


ALL_TYPES = ""
"""The GPU type of limits on GPUs of all types together."""


class TenantLimit(NamedTuple):
    """A limit of a tenant, as a namespace, a team, or the team that this is inside.

    Of waiting jobs it counts those that take part in the allocation, the oldest ones.
    """

    tenant: str
    field: LimitField
    gpu_type: str = ALL_TYPES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantJob:
    """A job that wants or holds GPUs.

    Attributes:
        tenants: whose limits hold for it.
        held: GPU type -> GPUs that its pods have now, those of an ended launch too; of all types those
            that it is to keep.
        sizes: GPUs that its gang may have, most first; of a running gang only its size counts, the first.
        grown: GPUs that it may have when it runs, fewest first; empty: those with which it is started.
        types: GPU types that it may use.
        runs_on: types on which it runs, and stays unless it is moved; empty: it waits.
    """

    name: str
    tenants: tuple[str, ...]
    held: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    grown: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    runs_on: frozenset[str] = frozenset()

    @property
    def least(self) -> int:
        """GPUs without which it does not run."""
        return self.grown[0] if self.grown else self.sizes[-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantAdmission:
    """Jobs that take part in the decision, and the limits that keep others out.

    Attributes:
        sizes: job -> GPUs of its gang, for jobs that take part.
        by_type: of each of these: GPU type -> most GPUs that it may have there; empty: no limit is by type.
        over: job -> limit that keeps it out.
        room: tenant -> GPUs that its jobs may have besides what its running gangs keep, for tenants with a
            limit on GPUs of all types.
    """

    sizes: Mapping[str, int]
    by_type: Mapping[str, Mapping[str, int]]
    over: Mapping[str, TenantLimit]
    room: Mapping[str, int]


def admit_by_tenant(
    jobs: Sequence[TenantJob], limits: Mapping[TenantLimit, int], others: Iterable[TenantJob] = ()
) -> TenantAdmission:
    """Jobs of ``jobs``, in order of arrival, that take part.

    A waiting job that a limit keeps out also keeps out the younger ones of its tenant, so that small gangs do
    not overtake a large one without end; one that alone exceeds the limit does not. Where a limit on all
    types leaves less room than the largest gang, the gang is as large as the room allows.

    So that no choice of types exceeds a limit, a gang counts on every limited type that it may use: first
    where it runs, then the least sizes of those that wait, oldest first, of running ones that could move
    there, and then what they may grow by.

    Args:
        jobs: those that want GPUs.
        limits: limit -> what the tenant may have of it; absent: any number.
        others: jobs that want none and hold some, e.g. until a suspended one has saved.
    """
    ledger = _Ledger(limits, [*jobs, *others])
    sizes, by_type = dict[str, int](), dict[str, dict[str, int]]()
    over: dict[str, TenantLimit] = {}
    typed = {limit.tenant for limit in limits if limit.field is LimitField.GPUS_BY_TYPE}
    for job in sorted(jobs, key=lambda job: bool(job.runs_on)):
        size = job.sizes[0] if job.runs_on else ledger.start(job)
        if isinstance(size, TenantLimit):
            over[job.name] = size
            continue
        by_its_types = job.types and not typed.isdisjoint(job.tenants)
        most = ledger.least_by_type(job) if by_its_types else dict[str, int]()
        if isinstance(most, TenantLimit):
            over[job.name] = most
            continue
        ledger.admit(job, size, most)
        sizes[job.name], by_type[job.name] = size, most
    for job in jobs:
        if job.name in sizes:
            ledger.grow(job, by_type[job.name], job.grown[-1] if job.grown else sizes[job.name])
    return TenantAdmission(sizes=sizes, by_type=by_type, over=over, room=ledger.room)


class _Ledger:
    """Rest of each limit, and the limits for which the younger jobs of a tenant have to wait."""

    def __init__(self, limits: Mapping[TenantLimit, int], jobs: Iterable[TenantJob]) -> None:
        self._limits, self._left = limits, dict(limits)
        self._started: Counter[TenantLimit] = Counter()
        self._waited_for: set[TenantLimit] = set()
        for job in jobs:
            self._take(self._of(job, LimitField.RUNNING_JOBS), bool(job.runs_on))
            for gpu_type, count in job.held.items():
                self._take(self._of_gpus(job, gpu_type), count)

    @property
    def room(self) -> dict[str, int]:
        """GPUs left to each tenant, those of waiting jobs included: they are taken when a job is placed."""
        gpus = [limit for limit in self._limits if limit.field is LimitField.GPUS]
        return {limit.tenant: max(0, self._left[limit]) + self._started[limit] for limit in gpus}

    def _of(self, job: TenantJob, field: LimitField, gpu_type: str = ALL_TYPES) -> list[TenantLimit]:
        stated = (TenantLimit(tenant, field, gpu_type) for tenant in job.tenants)
        return [limit for limit in stated if limit in self._limits]

    def _of_gpus(self, job: TenantJob, gpu_type: str) -> list[TenantLimit]:
        field = LimitField.GPUS if gpu_type == ALL_TYPES else LimitField.GPUS_BY_TYPE
        return self._of(job, field, gpu_type)

    def _take(self, limits: Iterable[TenantLimit], count: int) -> None:
        for limit in limits:
            self._left[limit] -= count

    def _full(self, job: TenantJob, limits: Iterable[TenantLimit], more: int) -> list[TenantLimit]:
        """Limits of these that have no room for ``more``, or keep it for older jobs."""
        waits = set() if job.runs_on else self._waited_for
        return [limit for limit in limits if more > self._left[limit] or limit in waits]

    def admit(self, job: TenantJob, size: int, by_type: Mapping[str, int]) -> None:
        """Take what the job counts for: of a waiting one its gang, of each type its least GPUs."""
        if not job.runs_on:
            gpus, held = self._of_gpus(job, ALL_TYPES), job.held.get(ALL_TYPES, 0)
            self._take(self._counts(job), 1)
            self._take(gpus, max(0, size - held))
            self._started.update(dict.fromkeys(gpus, max(size, held)))
        for gpu_type, least in by_type.items():
            self._take(self._of_gpus(job, gpu_type), max(0, least - job.held.get(gpu_type, 0)))

    def _counts(self, job: TenantJob) -> list[TenantLimit]:
        """Limits on numbers of jobs."""
        return [*self._of(job, LimitField.WAITING_JOBS), *self._of(job, LimitField.RUNNING_JOBS)]

    def start(self, job: TenantJob) -> int | TenantLimit:
        """GPUs for which a waiting gang has room; or the limit that keeps it out."""
        gpus, held = self._of_gpus(job, ALL_TYPES), job.held.get(ALL_TYPES, 0)
        never = [limit for limit in gpus if job.sizes[-1] > self._limits[limit]]
        full = never or self._full(job, self._counts(job), 1)
        if full:
            return full[0]
        for size in job.sizes:
            # Its own pods of an earlier launch are gone before it is launched again.
            full = self._full(job, gpus, size - held)
            if not full:
                return size
        self._waited_for.update(full)
        return full[0]

    def least_by_type(self, job: TenantJob) -> dict[str, int] | TenantLimit:
        """GPU type -> least GPUs of the gang, where they are left; or a limit that leaves it no type."""
        found, full, in_the_way = dict[str, int](), list[TenantLimit](), list[TenantLimit]()
        for gpu_type in job.types:
            limits, held = self._of_gpus(job, gpu_type), job.held.get(gpu_type, 0)
            short = self._full(job, limits, job.least - held)
            if limits and gpu_type in job.runs_on:
                found[gpu_type] = max(held, job.least)
            elif not short:
                found[gpu_type] = job.least
            else:
                full += short
                if all(job.least <= self._limits[limit] for limit in limits):
                    in_the_way += short
        if not found:
            self._waited_for.update(in_the_way)
        return found or full[0]

    def grow(self, job: TenantJob, most: dict[str, int], largest: int) -> None:
        """Raise what the gang may have of each type as far as limits have room, at most to ``largest``."""
        for gpu_type, there in most.items():
            limits = self._of_gpus(job, gpu_type)
            more = max(0, min([largest - there, *(self._left[limit] for limit in limits)]))
            self._take(limits, more)
            most[gpu_type] += more
