"""All that may happen next in the model."""

from collections.abc import Callable, Iterator
from typing import Any

from ballast_policies.protocol.machine import next_move
from ballast_policies.protocol.moves import BeginGrowth, Decision, End, WritePlan
from ballast_policies.protocol.observed import (
    Action,
    Deadline,
    Observed,
    Offer,
)

from tests.policies.protocol.laws import apply, by_name
from tests.policies.protocol.model import (
    Cache,
    Job,
    World,
    observe,
    stored,
    writes,
)
from tests.policies.protocol.search import Step
from tests.policies.protocol.surroundings import FAULTS, kubelet, trainer, user, with_pod, without_pod

Machine = Callable[[Observed], Decision]

LIMITS = tuple(deadline for deadline in Deadline if deadline not in (Deadline.PAUSE, Deadline.KEPT))
ALWAYS_OVER = frozenset({Deadline.PAUSE})


def set_job(world: World, index: int, job: Job) -> World:
    return world._replace(jobs=(*world.jobs[:index], job, *world.jobs[index + 1 :]))


def spend(world: World, name: str) -> World:
    left = getattr(world.budget, name)
    assert left > 0
    return world._replace(budget=world.budget._replace(**{name: left - 1}))


class Steps:
    """The steps from a world.

    Args:
        machine: the product's, or one with a mistake.
        fresh, reserve: whether the operator looks again before it frees GPUs, and keeps GPUs reserved whose
            launch was not answered; without them it makes mistakes, too.
    """

    def __init__(self, machine: Machine = next_move, *, fresh: bool = True, reserve: bool = True) -> None:
        self._machine = machine
        self._fresh = fresh
        self._reserve = reserve
        self._known: dict[Observed, Decision] = {}

    def __call__(self, world: World) -> Iterator[Step]:
        calm = [
            (f"{'ab'[index]}: {label}", False, after)
            for index in range(len(world.jobs))
            for label, after in self._calm(world, index)
        ]
        calm += [(label, False, after) for label, after in self._late(world)]
        yield from calm
        for index in range(len(world.jobs)):
            for label, after in self._faults(world, index):
                yield f"{'ab'[index]}: {label}", True, after
            if not calm or world.budget.early:
                for label, after in self._passes(world, index, timeouts=True):
                    early = spend(after, "early") if calm else after
                    yield f"{'ab'[index]}: {label}", bool(calm), early
        if world.budget.crashes:
            yield from self._crashes(spend(world, "crashes"))

    def _calm(self, world: World, index: int) -> Iterator[tuple[str, World]]:
        job = world.jobs[index]
        for happenings in (kubelet(world, job), trainer(job), user(job)):
            for label, after in happenings:
                yield label, set_job(world, index, after)
        real = stored(job)
        for field in Cache._fields:
            if getattr(job.cache, field) != getattr(real, field):
                cache = job.cache._replace(**{field: getattr(real, field)})
                yield f"the operator hears of its {field}", set_job(world, index, job._replace(cache=cache))
        if job.unanswered:
            cache = job.cache._replace(status=job.status)
            known = job._replace(cache=cache, unanswered=False, reserved=())
            yield "the operator reads its status", set_job(world, index, known)
            return
        if job.work:
            yield self._write(world, index)
        else:
            yield from self._passes(world, index, timeouts=False)

    def _passes(self, world: World, index: int, *, timeouts: bool) -> Iterator[tuple[str, World]]:
        job = world.jobs[index]
        status = job.cache.status
        if job.work or job.unanswered:
            return
        offer = Offer(Action.PLACE, status.launches, job.size) if status.gang is None else None
        sets = [frozenset({limit}) for limit in LIMITS] if timeouts else [frozenset[Deadline]()]
        for over in sets:
            decision = self._decide(observe(world, index, offer, ALWAYS_OVER | over))
            if timeouts and decision == self._decide(observe(world, index, offer, ALWAYS_OVER)):
                continue
            requests = writes(job, decision, fresh=self._fresh)
            if requests:
                when = f" when {'/'.join(over)} is over" if over else ""
                yield (
                    f"a pass decides {_text(decision)}{when}",
                    set_job(world, index, job._replace(work=requests)),
                )

    def _decide(self, seen: Observed) -> Decision:
        known = self._known.get(seen)
        if known is None:
            known = self._known[seen] = self._machine(seen)
        return known

    def _faults(self, world: World, index: int) -> Iterator[tuple[str, World]]:
        job, budget = world.jobs[index], world.budget
        for name, what in FAULTS.items():
            if getattr(budget, name):
                for label, after in what(job):
                    yield label, set_job(spend(world, name), index, after)
        gang = job.cache.status.gang
        if gang is not None and not (job.work or job.unanswered or job.cache.status.ended):
            offers = []
            if budget.preemptions:
                offers.append(("preemptions", Offer(Action.RELEASE, gang.launch)))
            if budget.growths:
                offers.append(("growths", Offer(Action.KEEP, gang.launch, 1)))
            if budget.asks:
                offers.append(("asks", Offer(Action.KEEP, gang.launch, keep=gang.pods[:1])))
            for name, offer in offers:
                decision = self._decide(observe(world, index, offer, ALWAYS_OVER))
                asked = name == "asks" and isinstance(decision.move, WritePlan)
                if isinstance(decision.move, End | BeginGrowth) or (
                    asked and decision.move != self._decide(observe(world, index, None, ALWAYS_OVER)).move
                ):
                    begun = job._replace(work=writes(job, decision, fresh=self._fresh))
                    yield f"a pass decides {_text(decision)}", set_job(spend(world, name), index, begun)
        if job.work and budget.lost_answers:
            label, after = self._write(world, index)
            reserved = _taken(job.work) if self._reserve else ()
            cut = after.jobs[index]._replace(work=(), cache=job.cache, unanswered=True, reserved=reserved)
            yield f"{label}; the answer is lost", set_job(spend(after, "lost_answers"), index, cut)
            never = job._replace(work=(), unanswered=True, reserved=reserved)
            yield f"{label} does not arrive", set_job(spend(world, "lost_answers"), index, never)

    def _write(self, world: World, index: int) -> tuple[str, World]:
        """The next write of the job's pass."""
        job = world.jobs[index]
        write, rest = job.work[0], job.work[1:]
        after, done = apply(world, job, write, late=False)
        cache = after.cache
        if done:
            match write[0]:
                case "fresh":
                    done = write[1:] == (job.pods, job.lease.finished)
                    cache = cache._replace(pods=job.pods, lease=job.lease)
                case "status":
                    cache = cache._replace(status=after.status)
                case "plan":
                    cache = cache._replace(plan=after.plan)
                case "create":
                    (new,) = (live for live in after.pods if live.pod.name == write[1])
                    others = (live for live in cache.pods if live.pod.name != new.pod.name)
                    cache = cache._replace(pods=by_name((*others, new)))
                case "delete":
                    there = any((live.pod.name, live.uid) == write[1:3] for live in after.pods)
                    told = Job(0, pods=cache.pods)
                    known = (
                        with_pod(told, *write[1:3], leaving=True) if there else without_pod(told, *write[1:3])
                    )
                    cache = cache._replace(pods=known.pods)
        label = f"write {_short(write)}" + ("" if done else ": conflict")
        return label, set_job(world, index, after._replace(cache=cache, work=rest if done else ()))

    def _late(self, world: World) -> Iterator[tuple[str, World]]:
        """A request of a dead leader arrives, or does not."""
        for number, (index, write) in enumerate(world.late):
            left = world._replace(late=(*world.late[:number], *world.late[number + 1 :]))
            yield f"late {_short(write)} never arrives", left
            job, done = apply(world, world.jobs[index], write, late=True)
            if done and job != world.jobs[index]:
                after = set_job(left._replace(was_late=True), index, job)
                yield f"late {_short(write)} arrives", after

    def _crashes(self, world: World) -> Iterator[Step]:
        heads = tuple(
            (i, job.work[0]) for i, job in enumerate(world.jobs) if job.work and job.work[0][0] != "fresh"
        )
        fresh = tuple(
            job._replace(cache=stored(job), work=(), unanswered=False, reserved=()) for job in world.jobs
        )
        yield "the operator dies; another one lists everything", True, world._replace(jobs=fresh)
        if heads and world.budget.in_flight:
            flying = spend(world, "in_flight")
            label = "the leader loses its lease with requests under way; another one lists everything"
            yield label, True, flying._replace(jobs=fresh, late=(*world.late, *heads))


def _taken(work: tuple[Any, ...]) -> tuple[str, ...]:
    """Pods of the gang that a pass is about to write, if it takes GPUs."""
    for write in work:
        if write[0] == "status" and write[2].gang is not None:
            before = write[1].gang.pods if write[1].gang is not None else ()
            return write[2].gang.pods if len(write[2].gang.pods) > len(before) else ()
    return ()


def _text(decision: Decision) -> str:
    move = decision.move
    deleted = f", deleting {', '.join(decision.delete)}" if decision.delete else ""
    return type(move).__name__ + (f" {move.cause}" if isinstance(move, End) else "") + deleted


def _short(write: Any) -> str:
    match write:
        case ("status", _, after):
            gang = after.gang
            if gang is None:
                return f"status: {after.ended or 'no GPUs'}"
            ending = f", ending {gang.ending}" if gang.ending is not None else ""
            return f"status: launch {gang.launch} of {len(gang.pods)}{ending}"
        case ("plan", _, plan):
            return f"plan {plan.epoch} {plan.directive} {len(plan.pods)}"
    return " ".join(str(part) for part in write[:2])
