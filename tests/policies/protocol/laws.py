"""What a write does in the model, and what must never be."""

from collections.abc import Iterable
from typing import Any

from ballast_policies.protocol.observed import Pod

from tests.policies.protocol.model import Job, Live, World, alive
from tests.policies.protocol.search import ViolationError
from tests.policies.protocol.surroundings import with_pod, without_pod


def by_name(pods: Iterable[Live]) -> tuple[Live, ...]:
    return tuple(sorted(pods, key=lambda live: (live.pod.name, live.uid)))


def apply(world: World, job: Job, write: Any, *, late: bool) -> tuple[Job, bool]:
    """The job after a write, and whether it was accepted.

    Raises:
        ViolationError: the write itself must not be.
    """
    match write:
        case ("fresh", _, _):
            return job, True
        case ("status", before, after):
            if job.status != before:
                return job, False
            _check_status(job, after, late=late or world.was_late)
            return job._replace(status=after), True
        case ("plan", before, after):
            return (job._replace(plan=after), True) if job.plan == before else (job, False)
        case ("create", name, launch):
            if any(live.pod.name == name for live in job.pods):
                return job, False
            gang = job.status.gang
            if not (late or world.was_late) and (
                gang is None or name not in gang.pods or gang.ending is not None
            ):
                raise ViolationError(f"{name} is made without a written intent")
            pod = Pod(name, launch, int(name.rsplit("-", 1)[1]))
            made = job._replace(pods=by_name((*job.pods, Live(pod, job.made))), made=job.made + 1)
            named = job.plan.pods if job.plan is not None and job.plan.launch == launch else ()
            if name in named and not job.script:
                made = made._replace(strangers=job.strangers | {job.made})
            return made, True
        case ("delete", name, uid, force):
            found = [live for live in job.pods if live.pod.name == name]
            if not found:
                return job, True
            if found[0].uid != uid:
                return job, False
            if not (late or world.was_late):
                _check_deletion(job, found[0].pod)
            return (without_pod(job, name, uid) if force else with_pod(job, name, uid, leaving=True)), True
    raise AssertionError(write)


def _check_status(job: Job, after: Any, *, late: bool) -> None:
    before = job.status
    if before.ended:
        raise ViolationError(f"a job that has {before.ended} changes")
    if before.gang is not None and before.gang.ending is not None and after.gang is not None:
        raise ViolationError("a launch that has to end changes")
    if after.gang is None and alive(job.pods) and not late:
        raise ViolationError(f"the job holds nothing, but {alive(job.pods)} are alive")
    if after.ended == "Succeeded" and not job.lease.finished:
        raise ViolationError("a job succeeds that is not done")
    # A script whose last rank exits as its pods are deleted runs again from its checkpoint.
    if before.gang is None and after.gang is not None and job.lease.finished and not job.script:
        raise ViolationError("a job that is done is launched")


def _check_deletion(job: Job, pod: Pod) -> None:
    """A gang that does not end loses a rank only after rank 0 has acknowledged a plan without it."""
    gang, plan = job.status.gang, job.plan
    if gang is None or gang.ending is not None or pod.launch != gang.launch or not pod.alive:
        return
    if plan is None or job.lied:
        return  # somebody has deleted it, or rank 0 lies
    if plan.launch != gang.launch:
        if pod.name in gang.pods:
            raise ViolationError(f"{pod.name} of a launch without a plan is deleted")
        return
    if pod.name in plan.pods:
        raise ViolationError(f"{pod.name}, which the plan keeps, is deleted")
    if pod.name in gang.pods and job.lease.acknowledged < plan.epoch:
        raise ViolationError(f"{pod.name} is released before the acknowledgement")


def problem(world: World) -> str:
    """What must never be, at any time; empty: all is well."""
    bound = sum(live.pod.phase == "Running" for job in world.jobs for live in job.pods)
    if bound > world.gpus:
        return f"{bound} pods run on {world.gpus} GPUs"
    if world.was_late:
        return ""  # kube-scheduler keeps GPUs apart; that such pods go is checked by "an end is reached"
    promised = sum(len(_promised(job)) for job in world.jobs)
    if promised > world.gpus:
        return f"{promised} pods are promised one of {world.gpus} GPUs"
    for job in world.jobs:
        if len({live.pod.launch for live in job.pods if live.pod.alive}) > 1:
            return "two launches of a job are alive"
    return ""


def _promised(job: Job) -> set[str]:
    gang = job.status.gang
    return {*alive(job.pods), *(gang.pods if gang is not None and gang.ending is None else ())}


def is_end(world: World) -> bool:
    """Every job has ended and nothing is left of it."""
    return not world.late and all(
        job.status.ended and not alive(job.pods) and not job.work and not job.unanswered for job in world.jobs
    )
