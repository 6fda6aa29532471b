"""The values of the model: what is stored, what the operator knows, and what may still go wrong.

One node with a few GPUs; jobs, their pods and trainers; an operator with a cache that is late, passes of
which each write is a step of its own, and requests of a dead leader that are still under way.
"""

from typing import Any, NamedTuple

from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.moves import Decision
from ballast_policies.protocol.observed import (
    Deadline,
    Gang,
    Observed,
    Offer,
    Phase,
    Pod,
    ProposedShrink,
    WrittenPlan,
    held_pods,
)

from tests.policies.protocol.search import ViolationError

NAME = "job"
"""Of every job: names of pods are compared within a job only."""


class Status(NamedTuple):
    """What a job's status says; ``ended``: "", "Succeeded" or "Failed"."""

    launches: int = 0
    gang: Gang | None = None
    ended: str = ""
    failures: int = 0


class Live(NamedTuple):
    """A pod as the API server has it."""

    pod: Pod
    uid: int


class Lease(NamedTuple):
    """What rank 0 has said."""

    acknowledged: int = 0
    proposal: ProposedShrink | None = None
    finished: bool = False


class Trainer(NamedTuple):
    """What the ranks have agreed on; ``left``: pods that a shrink has released."""

    launch: int = 0
    epoch: int = 0
    ranks: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    stopped: bool = False
    done: bool = False
    hung: bool = False
    refused: int = 0
    """Epoch of a shrink that the ranks do not carry out: they train on, and follow later plans."""


class Cache(NamedTuple):
    """What the operator knows of a job."""

    status: Status = Status()
    plan: WrittenPlan | None = None
    pods: tuple[Live, ...] = ()
    lease: Lease = Lease()


class Job(NamedTuple):
    """A job, what is stored of it, and what the operator makes of it; ``work``: writes of its pass."""

    size: int
    status: Status = Status()
    plan: WrittenPlan | None = None
    pods: tuple[Live, ...] = ()
    lease: Lease = Lease()
    trainer: Trainer = Trainer()
    suspended: bool = False
    lied: bool = False
    """Rank 0 has acknowledged what it had not reached: then only its own job suffers."""
    made: int = 0
    strangers: frozenset[int] = frozenset()
    """UIDs of pods that were made when the plan named an earlier pod of their name: it has the address of
    that one, and they refuse it (``_check_address`` in ``trainer-image/ballast_trainer/cli/pod.py``)."""
    cache: Cache = Cache()
    work: tuple[Any, ...] = ()
    unanswered: bool = False
    """The answer to a write was lost."""
    reserved: tuple[str, ...] = ()
    """Pods of a launch whose writing was not answered."""
    script: bool = False
    """It runs its template's own command: no trainer reads its plan or renews its lease.
    ``lease.finished`` is not seen but notes that all ranks had exited with success by themselves."""
    copies: bool = False
    """Its ranks go on in place without a pod that is lost."""


class Budget(NamedTuple):
    """How often each thing may still go wrong, or be wanted."""

    crashes: int = 0
    in_flight: int = 0
    lost_answers: int = 0
    early: int = 0
    """Deadlines that pass while something could still happen."""
    failures: int = 0
    """Ranks that fail by the job's own fault."""
    kills: int = 0
    evictions: int = 0
    notices: int = 0
    """Nodes of a pod that announce that they go; then they do."""
    withdrawals: int = 0
    """Such notices that are taken back."""
    drains: int = 0
    """Pods that the cluster evicts, with time to leave."""
    hangs: int = 0
    lost_plans: int = 0
    preemptions: int = 0
    suspensions: int = 0
    shrinks: int = 0
    growths: int = 0
    asks: int = 0
    """Shrinks that the allocator asks for."""
    refusals: int = 0
    """Shrinks that the trainer does not carry out."""
    lies: int = 0
    """Acknowledgements of an epoch that was not reached."""


class World(NamedTuple):
    """All of it. ``late``: (job's index, write) of a dead leader; ``was_late``: one has arrived."""

    jobs: tuple[Job, ...]
    budget: Budget
    gpus: int
    late: tuple[tuple[int, Any], ...] = ()
    was_late: bool = False
    limit: int = 1


def stored(job: Job) -> Cache:
    """All that the API server has of a job."""
    return Cache(job.status, job.plan, job.pods, job.lease)


def alive(pods: tuple[Live, ...]) -> list[str]:
    return [live.pod.name for live in pods if live.pod.alive]


def running(job: Job, launch: int) -> set[str]:
    """Pods of a launch that a plan may mean."""
    pods = (pod for pod, uid in job.pods if uid not in job.strangers)
    return {pod.name for pod in pods if pod.phase is Phase.RUNNING and pod.launch == launch}


def held(status: Status, pods: tuple[Live, ...]) -> frozenset[str]:
    """As the operator counts: by its own function."""
    gang = status.gang
    ends = gang is not None and gang.ending is not None
    ended = [live.pod.name for live in pods if ends and not live.pod.alive]
    return held_pods(gang.pods if gang is not None else (), alive=alive(pods), ended=ended)


def free_gpus(world: World, index: int) -> int:
    """GPUs that no other job holds, as far as the operator knows, its own writes under way included."""
    used = 0
    for other, job in enumerate(world.jobs):
        if other == index:
            used += len(alive(job.cache.pods))
            continue
        names = {*held(job.cache.status, job.cache.pods), *job.reserved}
        for write in job.work:
            if write[0] == "status" and write[2].gang is not None:
                names |= set(write[2].gang.pods)
        used += len(names)
    return world.gpus - used


def observe(world: World, index: int, offer: Offer | None, over: frozenset[Deadline]) -> Observed:
    """What a pass over the job sees."""
    job = world.jobs[index]
    cache = job.cache
    status, gang = cache.status, cache.status.gang
    made = gang is not None and any(live.pod.launch == gang.launch for live in cache.pods)
    wanted = 0
    if gang is not None and not made:
        wanted = len(gang.pods)
    elif offer is not None:
        wanted = offer.size
    return Observed(
        job=NAME,
        ended=bool(status.ended),
        launches=status.launches,
        gang=gang,
        plan=cache.plan,
        pods=tuple(live.pod for live in cache.pods),
        acknowledged=cache.lease.acknowledged,
        heard=cache.lease.acknowledged,
        proposal=cache.lease.proposal,
        survivors=_survivors(job),
        copies=job.copies,
        finished=cache.lease.finished and not job.script,
        suspended=job.suspended,
        offer=offer,
        gpus_free=free_gpus(world, index) >= wanted,
        over=over,
        tries_left=status.failures <= world.limit,
        script=job.script,
        listens=not job.script,
    )


def _survivors(job: Job) -> tuple[str, ...]:
    """All that stay; none where none leaves, where rank 0 does and is not lost, and of a script."""
    plan, leaving = job.cache.plan, {live.pod.name for live in job.cache.pods if live.pod.leaves}
    if plan is not None and job.copies:
        there = {pod.name for pod, _ in job.cache.pods if pod.alive and pod.node_ready and not pod.leaving}
        leaving |= set(plan.pods) - there
    if plan is None or job.script or not leaving & set(plan.pods):
        return ()
    if plan.pods[0] in leaving and not (job.copies and _is_gone(job, plan.pods[0])):
        return ()
    return tuple(name for name in plan.pods if name not in leaving)


def _is_gone(job: Job, name: str) -> bool:
    return not any(pod.name == name and pod.answers for pod, _ in job.cache.pods)


def writes(job: Job, decision: Decision, *, fresh: bool) -> tuple[Any, ...]:
    """A decision as the requests that the operator sends, in its order."""
    cache, move = job.cache, decision.move
    kind = type(move).__name__
    uids = {live.pod.name: live.uid for live in cache.pods}
    requests: list[Any] = []
    if decision.needs_fresh_view and fresh:
        requests.append(("fresh", cache.pods, cache.lease.finished))
    requests += [("delete", name, uids[name], name in decision.force) for name in decision.delete]
    before = after = cache.status
    match kind:
        case "CreatePods":
            assert before.gang is not None
            requests += [("create", name, before.gang.launch) for name in move.pods]
        case "WritePlan":
            assert before.gang is not None
            plan = WrittenPlan(move.epoch, before.gang.launch, move.directive, move.pods)
            leaving = {live.pod.name for live in cache.pods if live.pod.leaves and live.pod.alive}
            if move.directive is Directive.SHRINK and leaving & set(move.pods):
                raise ViolationError(f"a shrink keeps {sorted(leaving)}, which leave")
            first = cache.plan.pods[0] if cache.plan is not None else ""
            led = first in move.pods or (job.copies and _is_gone(job, first))
            if move.directive is Directive.SHRINK and not led:
                raise ViolationError(f"a shrink leaves out {first}, which leads it")
            requests.append(("plan", cache.plan, plan))
        case "Launch":
            after = before._replace(gang=move.gang, launches=move.gang.launch)
        case "BeginGrowth" | "AbandonGrowth" | "RecordGrowth" | "RecordShrink":
            after = before._replace(gang=move.gang)
        case "End":
            after = before._replace(gang=move.gang, failures=before.failures + move.cause.counts)
        case "Release":
            after = before._replace(gang=None, ended="Failed" if move.failed else "")
        case "Succeed":
            after = before._replace(gang=None, ended="Succeeded")
    if after != before:
        requests.append(("status", before, after))
    return tuple(requests)


def directive_stops(plan: WrittenPlan) -> bool:
    return plan.directive is Directive.CHECKPOINT_AND_STOP
