"""Settings of an administrator: small frozen groups, all in seconds unless the name says otherwise."""

import dataclasses
import math
import os

from ballast_policies.contract.messages import RENEW_SECONDS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Limits of calls to the API server."""

    request_seconds: float = 10.0
    """Seconds after which a call counts as failed and its key is requeued."""

    resync_seconds: float = 60.0
    """Seconds between comparisons of caches with fresh lists: bounds the cost of a lost watch event."""

    stale_seconds: float = 20.0
    """Seconds by which a watch may lag behind a list before ``/healthz`` reports its stream as broken."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Deadlines of a job's life."""

    bind_seconds: float = 120.0
    """A gang whose pods are not all running with an address by then is rolled back: all or none."""

    pull_seconds: float = 1800.0
    """The same, while the nodes of all pods that do not run yet pull their images, or init containers run,
    where that is longer."""

    start_seconds: float = 300.0
    """Limit from the plan's writing to rank 0's first acknowledgement (imports, rendezvous, checkpoint)."""

    renew_seconds: float = RENEW_SECONDS
    """Seconds between renewals of a trainer's lease, while it has nothing else to tell."""

    heartbeat_seconds: float = 3 * RENEW_SECONDS
    """A gang whose lease is not renewed for this long while pods run is hung: it restarts. A lease
    says it, as of its launch."""

    shrink_seconds: float = 60.0
    """Limit from a shrink's plan to its acknowledgement; then the job restarts from its checkpoint."""

    stop_seconds: float = 60.0
    """Limit from checkpointAndStop to the pods' exit; then they are deleted (SIGTERM, which saves, too)."""

    exit_seconds: float = 10.0
    """Seconds a finished step may lag behind the pods' exit before a silent exit counts as a failure."""

    progress_seconds: float = 30.0
    """Least time between two status writes that carry progress alone: bounds API writes per job."""

    restart_base_seconds: float = 2.0
    """First pause before a job that failed is launched again; doubles each time."""

    restart_max_seconds: float = 300.0
    """Longest such pause."""

    ask_again_seconds: float = 30.0
    """Pause until pods that the cluster did not allow (a quota, a webhook, a name in use) are tried again,
    and Kueue is asked again."""

    kueue: bool = False
    """``BALLAST_KUEUE=true``: jobs with the label ``kueue.x-k8s.io/queue-name`` wait for Kueue."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverSettings:
    """The allocation's solver process."""

    limit_seconds: float = 10.0
    """A plan of a job's degrees that takes longer ends with its process. Of an allocation the ClusterPolicy
    says it: ``spec.solver.timeLimitSeconds``."""

    start_seconds: float = 60.0
    """Time for a fresh solver process to import its libraries and say so."""

    retry_seconds: float = 30.0
    """Seconds after which the solver is asked again, if not sooner, once the fallback has decided."""

    debounce_seconds: float = 0.2
    """Events within this long of each other share one allocation."""


MOST_SECONDS = 1e9
"""A Lease has whole seconds in 32 bits, and times end with the year 9999."""

MOST_LEASE_SECONDS = 600.0
"""No leader's Lease lasts longer: one that says more was edited, and would keep everybody from leading."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """Leader election. A follower takes over at the latest ``lease_seconds`` after the leader's death."""

    lease_seconds: float = 6.0
    """A lease that is not renewed for this long is free."""

    renew_seconds: float = 1.5
    """Seconds between the leader's renewals, and a follower's looks."""

    fence_seconds: float = 4.5
    """A leader that could not renew for this long writes nothing until it can; less than the duration."""

    stuck_seconds: float = 30.0
    """A leader whose main loop has not turned for this long does not renew, and ``/healthz`` fails."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The groups of settings."""

    api: ApiSettings = ApiSettings()
    job: JobSettings = JobSettings()
    solver: SolverSettings = SolverSettings()
    leader: LeaderSettings = LeaderSettings()
    workers: int = 8
    """Keys reconciled at the same time."""

    urgent_workers: int = 4
    """Keys reconciled at the same time in addition, if GPUs wait for them."""

    background_workers: int = 16
    """Keys reconciled at the same time in addition, if people alone wait for them: why a job waits."""


def from_environment(environment: "os._Environ[str] | dict[str, str]") -> Settings:
    """Settings with ``BALLAST_<GROUP>_<FIELD>`` applied, e.g. ``BALLAST_JOB_BIND_SECONDS=30``.

    Raises:
        ValueError: a value is not a positive number, or a name with one of the groups' prefixes is unknown.
    """
    settings = Settings()
    for group in ("api", "job", "solver", "leader"):
        prefix = f"BALLAST_{group.upper()}_"
        value = getattr(settings, group)
        names = {field.name for field in dataclasses.fields(value)}
        for variable in sorted(name for name in environment if name.startswith(prefix)):
            field = variable.removeprefix(prefix).lower()
            if not field.endswith("_seconds"):
                continue
            if field not in names:
                raise ValueError(
                    f"{variable}: there is no such setting. To fix: use one of "
                    + ", ".join(prefix + name.upper() for name in sorted(names))
                )
            try:
                seconds = float(environment[variable])
            except ValueError:
                seconds = math.nan
            if not 0 < seconds <= MOST_SECONDS:
                expected = f"expected seconds, more than 0 and at most {MOST_SECONDS:g}"
                raise ValueError(f"{variable}={environment[variable]!r}: {expected}")
            value = dataclasses.replace(value, **{field: seconds})
        settings = dataclasses.replace(settings, **{group: value})
    if environment.get("BALLAST_KUEUE") == "true":
        settings = dataclasses.replace(settings, job=dataclasses.replace(settings.job, kueue=True))
    leader = settings.leader
    if leader.renew_seconds >= leader.fence_seconds:
        raise ValueError(
            f"BALLAST_LEADER_RENEW_SECONDS={leader.renew_seconds:g}: a leader would stop writing before it "
            f"renews. To fix: less than BALLAST_LEADER_FENCE_SECONDS, {leader.fence_seconds:g}"
        )
    if leader.fence_seconds >= leader.lease_seconds:
        raise ValueError(
            f"BALLAST_LEADER_FENCE_SECONDS={leader.fence_seconds:g}: a leader would still write when another "
            f"may lead. To fix: less than BALLAST_LEADER_LEASE_SECONDS, {leader.lease_seconds:g}"
        )
    if leader.lease_seconds > MOST_LEASE_SECONDS:
        raise ValueError(
            f"BALLAST_LEADER_LEASE_SECONDS={leader.lease_seconds:g}: another replica would wait that long "
            f"for a leader that has died. To fix: at most {MOST_LEASE_SECONDS:g}"
        )
    job = settings.job
    if job.heartbeat_seconds < 2 * job.renew_seconds:
        raise ValueError(
            f"BALLAST_JOB_HEARTBEAT_SECONDS={job.heartbeat_seconds:g}: trainers renew their Lease every "
            f"{job.renew_seconds:g} s, so one late renewal would count as a hung job. To fix: at least "
            f"{2 * job.renew_seconds:g}, or a smaller BALLAST_JOB_RENEW_SECONDS"
        )
    return settings
