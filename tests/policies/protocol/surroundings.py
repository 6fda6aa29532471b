"""What kubelets, trainers and users may do in the model at any time."""

import dataclasses
from collections.abc import Callable, Iterator

from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.observed import Failure, Phase, Pod, ProposedShrink

from tests.policies.protocol.model import Job, Live, Trainer, World, alive, directive_stops, running

Happening = tuple[str, Job]


def with_pod(job: Job, name: str, uid: int, **changes: object) -> Job:
    pods = tuple(
        Live(dataclasses.replace(pod, **changes), one) if (pod.name, one) == (name, uid) else Live(pod, one)
        for pod, one in job.pods
    )
    return job._replace(pods=pods)


def without_pod(job: Job, name: str, uid: int) -> Job:
    return job._replace(pods=tuple(live for live in job.pods if (live.pod.name, live.uid) != (name, uid)))


def kubelet(world: World, job: Job) -> Iterator[Happening]:
    """Pods start where there is a GPU, end as their processes do, and go when they are deleted."""
    bound = sum(pod.phase is Phase.RUNNING for other in world.jobs for pod, _ in other.pods)
    for pod, uid in job.pods:
        if pod.leaving:
            yield f"{pod.name} is gone", without_pod(job, pod.name, uid)
        elif pod.phase is Phase.PENDING and bound < world.gpus:
            yield f"{pod.name} runs", with_pod(job, pod.name, uid, phase=Phase.RUNNING)
        if pod.leaves and pod.alive:
            gone = with_pod(job, pod.name, uid, phase=Phase.FAILED, failure=Failure.KILLED, node_ready=False)
            yield f"the node of {pod.name} goes", gone
        if pod.phase is Phase.RUNNING and job.script:
            yield from _script_ends(job, pod, uid)
        elif pod.phase is Phase.RUNNING:
            end = _end(job, pod, uid)
            if end is Failure.KILLED:
                yield f"{pod.name} exits with success", with_pod(job, pod.name, uid, phase=Phase.SUCCEEDED)
            elif end is not None:
                failed = with_pod(job, pod.name, uid, phase=Phase.FAILED, failure=end)
                yield f"{pod.name} ends: {end}", failed


def _script_ends(job: Job, pod: Pod, uid: int) -> Iterator[Happening]:
    """A command that has met its peers ends well, or fails because one is gone; SIGTERM ends it well, too."""
    met = job.trainer.launch == pod.launch
    if not (met or pod.leaving):
        return
    ended = with_pod(job, pod.name, uid, phase=Phase.SUCCEEDED)
    gang = ended.status.gang
    well = {p.name for p, _ in ended.pods if p.phase is Phase.SUCCEEDED and not p.leaving}
    if gang is not None and gang.launch == pod.launch and well >= set(gang.pods):
        ended = ended._replace(lease=ended.lease._replace(finished=True))
    yield f"{pod.name} exits with success", ended
    there = {p.name for p, _ in job.pods if p.phase in (Phase.RUNNING, Phase.SUCCEEDED)}
    if met and not set(job.trainer.ranks) <= there:
        failed = with_pod(job, pod.name, uid, phase=Phase.FAILED, failure=Failure.AT_FAULT)
        yield f"{pod.name} fails for want of a peer", failed


def _end(job: Job, pod: Pod, uid: int) -> Failure | None:
    """How the pod's process may end by itself; KILLED stands for success."""
    trainer, plan = job.trainer, job.plan
    if uid in job.strangers:
        named = plan is not None and plan.launch == pod.launch and pod.name in plan.pods
        return Failure.PEER_LOST if named else None
    alive_ranks = running(job, pod.launch)
    if trainer.launch == pod.launch:
        if pod.name in trainer.left or (trainer.done and pod.name in trainer.ranks):
            return Failure.KILLED
        if pod.name in trainer.ranks and trainer.stopped:
            return Failure.STOPPED
        if pod.name in trainer.ranks and not set(trainer.ranks) <= alive_ranks:
            return Failure.PEER_LOST
    elif plan is not None and plan.launch == pod.launch and pod.name in plan.pods:
        there = {p.name for p, _ in job.pods if p.launch == pod.launch and p.alive}
        if not set(plan.pods) <= there:
            return Failure.PEER_LOST
    return None


def trainer(job: Job) -> Iterator[Happening]:
    """Ranks follow the plan; rank 0 says so, and says when the last step is done."""
    ranks, plan, lease = job.trainer, job.plan, job.lease
    if job.script:
        gang = job.status.gang
        if gang is not None and ranks.launch != gang.launch and running(job, gang.launch) >= set(gang.pods):
            met = Trainer(launch=gang.launch, ranks=gang.pods)
            yield "the ranks of the command meet", job._replace(trainer=met)
        return
    if ranks.hung and (plan is None or plan.launch == ranks.launch):
        return
    newer = plan is not None and (plan.launch != ranks.launch or plan.epoch > ranks.epoch)
    newer = newer and plan is not None and plan.epoch != ranks.refused
    if plan is not None and newer and set(plan.pods) <= running(job, plan.launch):
        same = plan.launch == ranks.launch
        if not (same and (ranks.done or ranks.stopped)):
            left = (*ranks.left, *(name for name in ranks.ranks if name not in plan.pods)) if same else ()
            stops = directive_stops(plan)
            reached = Trainer(plan.launch, plan.epoch, plan.pods, left, stops)
            yield f"the ranks reach epoch {plan.epoch}", job._replace(trainer=reached)
    rank_0 = bool(ranks.ranks) and ranks.ranks[0] in running(job, ranks.launch)
    if rank_0 and lease.acknowledged != ranks.epoch:
        said = lease._replace(acknowledged=ranks.epoch)
        yield f"rank 0 acknowledges epoch {ranks.epoch}", job._replace(lease=said)
    trains = rank_0 and lease.acknowledged == ranks.epoch and not (ranks.stopped or ranks.done)
    if trains and set(ranks.ranks) <= running(job, ranks.launch):
        done = job._replace(trainer=ranks._replace(done=True), lease=lease._replace(finished=True))
        yield "the last step is done and saved", done


FAULTS: dict[str, Callable[[Job], Iterator[Happening]]] = {}
"""Field of the budget -> what it pays for."""


def fault(what: Callable[[Job], Iterator[Happening]]) -> Callable[[Job], Iterator[Happening]]:
    FAULTS[what.__name__] = what
    return what


@fault
def failures(job: Job) -> Iterator[Happening]:
    for pod, uid in job.pods:
        if pod.phase is Phase.RUNNING:
            failed = with_pod(job, pod.name, uid, phase=Phase.FAILED, failure=Failure.AT_FAULT)
            yield f"{pod.name} fails by the user's fault", failed


@fault
def kills(job: Job) -> Iterator[Happening]:
    for pod, uid in job.pods:
        if pod.alive:
            failed = with_pod(job, pod.name, uid, phase=Phase.FAILED, failure=Failure.KILLED)
            yield f"{pod.name} is killed", failed


@fault
def evictions(job: Job) -> Iterator[Happening]:
    for pod, uid in job.pods:
        if not pod.leaving:
            yield f"somebody deletes {pod.name}", with_pod(job, pod.name, uid, leaving=True)
        if job.copies and pod.alive:
            forced = with_pod(job, pod.name, uid, leaving=True, forced=True)
            yield f"somebody forces {pod.name} out", forced


@fault
def notices(job: Job) -> Iterator[Happening]:
    for pod, uid in job.pods:
        if pod.alive and not pod.leaves:
            yield f"the node of {pod.name} announces that it goes", with_pod(job, pod.name, uid, leaves=True)


@fault
def withdrawals(job: Job) -> Iterator[Happening]:
    for pod, uid in job.pods:
        if pod.alive and pod.leaves and not pod.leaving:
            yield f"the node of {pod.name} stays after all", with_pod(job, pod.name, uid, leaves=False)


@fault
def drains(job: Job) -> Iterator[Happening]:
    for pod, uid in job.pods:
        if pod.alive and not pod.leaving:
            yield f"{pod.name} is evicted", with_pod(job, pod.name, uid, leaves=True, leaving=True)


@fault
def hangs(job: Job) -> Iterator[Happening]:
    if job.trainer.launch and not (job.trainer.hung or job.trainer.done or job.trainer.stopped):
        yield "the trainer hangs", job._replace(trainer=job.trainer._replace(hung=True))


@fault
def lost_plans(job: Job) -> Iterator[Happening]:
    if job.plan is not None:
        yield "somebody deletes the plan", job._replace(plan=None)


@fault
def suspensions(job: Job) -> Iterator[Happening]:
    if not job.suspended and not job.status.ended:
        yield "the user suspends the job", job._replace(suspended=True)


@fault
def shrinks(job: Job) -> Iterator[Happening]:
    ranks, lease = job.trainer, job.lease
    trains = lease.acknowledged == ranks.epoch and not (ranks.stopped or ranks.done or ranks.hung)
    known = lease.proposal is not None and lease.proposal.epoch == ranks.epoch
    if trains and len(ranks.ranks) > 1 and not known and set(ranks.ranks) <= running(job, ranks.launch):
        proposal = ProposedShrink(ranks.epoch, ranks.ranks[:1], ranks.ranks[1:])
        yield "rank 0 proposes to shrink", job._replace(lease=lease._replace(proposal=proposal))


@fault
def refusals(job: Job) -> Iterator[Happening]:
    ranks, plan = job.trainer, job.plan
    news = plan is not None and plan.launch == ranks.launch and plan.epoch > ranks.epoch
    if plan is not None and news and plan.directive is Directive.SHRINK and ranks.refused != plan.epoch:
        yield "the trainer does not shrink", job._replace(trainer=ranks._replace(refused=plan.epoch))


@fault
def lies(job: Job) -> Iterator[Happening]:
    plan = job.plan
    if plan is not None and alive(job.pods) and plan.directive is not Directive.RUN:
        lie = job.lease._replace(acknowledged=plan.epoch)
        if lie != job.lease:
            yield "rank 0 acknowledges what it has not reached", job._replace(lease=lie, lied=True)


def user(job: Job) -> Iterator[Happening]:
    if job.suspended:
        yield "the user resumes the job", job._replace(suspended=False)
