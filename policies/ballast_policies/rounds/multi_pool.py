"""Gangs that may run in several pools: what is free at the end goes to those for which it is worth it.

Those that no pool holds, and those that run in several, were granted their least sizes (:mod:`.claims`) and
have grown (:mod:`.elastic`) beside the others. One that starts, or is started elsewhere, takes the fastest
division of what is free; one that waits for as many GPUs of one pool is started on those of several; at the
end of a round a running gang is started elsewhere where that wins more than its restart costs.

Of the policy that chooses sizes and pools itself, by the completion times that follow:

1. :class:`~ballast_policies.elastic.completion_time.CompletionTime` chooses a pool and a size for each gang
   (pools, for one that no pool holds), or that it waits, within the GPUs of the pools and what gangs may do
   now: one that must not be disturbed keeps its pool, and of its sizes those that it may have. Within a
   round, where none may be stopped, its choice is taken as it is; whether restarts pay is tried out at the
   ends of rounds.
2. The chosen gangs are granted their least sizes in these pools, and grow to the chosen ones first.
3. What is left goes to the gangs that were not chosen, those that run first.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.allocation.instance import DEFAULT_SECONDS
from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Configuration, Job
from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.elastic.completion_time import BASE, CompletionTime
from ballast_policies.elastic.job import LEAST_SECONDS, ElasticCluster, ElasticJob, JobState
from ballast_policies.rounds.claims import longest_run, priorities, promised_to
from ballast_policies.rounds.divisions import best_parts, mixtures, open_nodes, room_on
from ballast_policies.rounds.draft import Draft, Explained, Reason
from ballast_policies.rounds.elastic import grant_elastic
from ballast_policies.rounds.gangs import RESTART_SECONDS, ElasticGang, MixedGang
from ballast_policies.rounds.grants import fill
from ballast_policies.rounds.ledger import Ledger, given_to_tenants, in_its_pools, pack
from ballast_policies.rounds.memory import exempt_newest, moves_left, within_min_run
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import NodeRequest, Placement

STAYS, STARTS = 1.0, 0.999
"""Shares in the chosen pool: of two pools alike a gang keeps its own."""

OVER_ROOM = "by the jobs' completion times other jobs are to have the GPUs that its namespace may hold"

GRANTED = ("", "stays on ")
"""Lead of the reason of a gang that was granted its GPUs by its share."""


def grant_sizes(question: Question) -> Draft:
    """The round with the sizes that the policy chooses, if it chooses some."""
    if question.surplus is not Surplus.COMPLETION_TIME or not question.jobs:
        return grant_elastic(question)
    chosen = _choice(question)
    first = grant_elastic(_chosen_alone(question, chosen))
    placed, running = first.placements, question.state.running
    reasons = {
        name: dataclasses.replace(
            why, text=f"{chosen[name].total} GPUs are to be its, by the jobs' completion times"
        )
        if why.lead in GRANTED
        else why
        for name, why in first.reasons.items()
    }
    # Moves of those beside chosen gangs would not be counted by the second pass.
    limited = question.settings.max_moves_per_hour is not None
    staying = first.seconds if limited else within_min_run(question, first.seconds)
    there = {*placed, *staying}
    rest = question.without(
        there,
        Counter(node for at in placed.values() for node in at.nodes),
        moves=len({*first.changes.moved} - {*first.changes.displaced}),
        tenants=given_to_tenants(question, placed),
    )
    over = _over_their_room(rest)
    rest = rest.without(over, {})
    shares = {
        job.name: {rest.columns.get(held.pool, held.gpu_type): STAYS}
        for job in rest.jobs
        if (held := running.get(job.name)) is not None
    }
    second = grant_elastic(_of_these_shares(rest, shares))
    placements, seconds = {**second.placements, **placed}, {**first.seconds, **second.seconds}
    kept_for = {**second.kept_for, **first.kept_for}
    kept_for = {pool: name for pool, name in kept_for.items() if name not in placements}
    explained = Explained(question, placements, kept_for)
    waiting = {job.name: explained.waiting(job) for job in question.jobs if job.name not in placements}
    waiting |= {name: Reason(OVER_ROOM) for name in over}
    return Draft(
        question=question,
        placements=placements,
        seconds={name: at for name, at in seconds.items() if name not in placements},
        reasons={**reasons, **second.reasons, **waiting},
        kept_for=kept_for,
    )


def _over_their_room(rest: Question) -> list[str]:
    """Jobs for which the chosen gangs have left too few of their tenants' GPUs, first come, first served."""
    room, over = dict(rest.room), []
    for job in rest.jobs:
        tenant = rest.tenants.get(job.name, "")
        if tenant not in room or rest.trains(job.name):
            continue
        if job.gpus > room[tenant]:
            over.append(job.name)
        else:
            room[tenant] -= job.gpus
    return over


def _of_these_shares(question: Question, shares: dict[str, dict[str, float]]) -> Question:
    """The question with shares that no account counts for or against."""
    state = dataclasses.replace(question.state, received={}, promised=None)
    return dataclasses.replace(question, shares=shares, state=state)


def _chosen_alone(question: Question, chosen: Mapping[str, Configuration]) -> Question:
    """The question of the chosen gangs alone, each on the GPU types of its pools; a pool is a column."""
    types = question.types
    jobs, shares, elastic, mixed = [], {}, {}, dict(question.mixed)
    for job in question.jobs:
        if job.name not in chosen:
            continue
        pools, at = chosen[job.name].gpus, question.state.running.get(job.name)
        here = {types[pool] for pool in pools}
        rates = {gpu_type: rate for gpu_type, rate in job.throughput.items() if gpu_type in here}
        jobs.append(dataclasses.replace(job, throughput=rates))
        pool = next(iter(pools))
        stays = at is not None and at.pool == pool
        shares[job.name] = {pool: STAYS if stays else STARTS}
        if question.in_several_pools(job.name):
            if at is None:
                speeds = {kind: rate for kind, rate in mixed[job.name].speeds.items() if kind in here}
                mixed[job.name] = dataclasses.replace(mixed[job.name], speeds=speeds)
            continue
        gang = question.elastic.get(job.name)
        if gang is not None:
            elastic[job.name] = dataclasses.replace(
                gang, speeds={types[pool]: gang.speeds.get(types[pool], {})}, wanted=pools[pool]
            )
    alone = dataclasses.replace(
        question,
        jobs=jobs,
        elastic=elastic,
        mixed=mixed,
        parts=question.claimed_parts(),
        columns={name: name for name in types},
    )
    return _of_these_shares(alone, shares)


def _choice(question: Question) -> dict[str, Configuration]:
    """Job -> pools with its GPUs there, of the gangs that are to run."""
    cluster = ElasticCluster(nodes=question.gpus, gpus_per_node=dict.fromkeys(question.gpus, 1))
    policy = CompletionTime(cluster=cluster, round_seconds=1.0)
    held, ledger = dict[str, Placement](), Ledger(question.nodes)
    for name in sorted(question.holders, key=question.state.by_age):  # nodes may be gone, or have lost GPUs
        at = question.holders[name]
        least = dataclasses.replace(at, nodes=question.least(name, at))
        there = (one for one in (at, least) if in_its_pools(one, ledger.nodes) and ledger.grant(one.nodes))
        if (continues := next(there, None)) is not None:
            held[name] = continues
    seconds = {name: first for name, first in question.second_jobs.items() if first in held}
    kept, limit = within_min_run(question, {**held, **seconds}), moves_left(question)
    while True:
        found = [
            _state(job, question, held.get(job.name), job.name in kept)
            for job in question.jobs
            if job.name not in seconds.keys() & kept.keys()
        ]
        states = [state for state in found if state is not None]
        if question.settings.within_round:
            return _by_name(states, policy.choice(states, BASE))
        chosen = _by_name(states, policy(states, question.now))
        disturbed = {
            state.job.name: held[state.job.name]
            for state in states
            if state.job.name in held and state.job.name not in kept
            if (to := chosen.get(state.job.name)) is None or held[state.job.name].pool not in to.gpus
        }
        disturbed |= {
            name: question.state.running[name]
            for name, first in seconds.items()
            if name not in kept and (name in chosen or first in disturbed)
        }
        if len(disturbed) <= limit:
            return chosen
        more = exempt_newest(disturbed, question.state, limit, "")
        kept |= more | {seconds[name]: why for name, why in more.items() if name in seconds}


def _by_name(states: Sequence[JobState], chosen: Sequence[Configuration | None]) -> dict[str, Configuration]:
    return {state.job.name: to for state, to in zip(states, chosen, strict=True) if to is not None}


def _state(job: Job, question: Question, at: Placement | None, keeps: bool) -> JobState | None:
    """The job as the choice sees it; None: no pool can hold it.

    ``at``: where it runs; ``keeps``: it must not be stopped or moved.
    """
    several = question.in_several_pools(job.name)
    gang = None if several else question.elastic.get(job.name)
    if several:
        every, now = _over_pools(job, question, at)
    else:
        every, now = _in_each_pool(job, question, gang, at)
    if not every:
        return None
    fastest = max(each.throughput for each in every)
    steps = DEFAULT_SECONDS * fastest if job.steps_remaining is None else job.steps_remaining
    work = min(max(steps, 2 * LEAST_SECONDS * fastest), MOST_SECONDS / 2 * fastest)
    held_to: tuple[Configuration, ...] = ()
    if now is not None and keeps:
        held_to = tuple(
            each
            for each in every
            if each.gpus.keys() == now.gpus.keys() and _may_become(each.total, now.total, gang)
        )
    pause = gang.restart_seconds if gang is not None else RESTART_SECONDS
    return JobState(
        job=ElasticJob(
            name=job.name,
            arrival=0.0,
            work=work,
            restart_seconds=min(pause, MOST_SECONDS),
            configurations=tuple(every),
            resize_seconds=None if gang is None or not gang.live else gang.pause_seconds,
            weight=job.weight,
        ),
        remaining=work,
        current=now,
        held_to=held_to,
    )


Ways = tuple[list[Configuration], Configuration | None]
"""Configurations that a gang may have, by pool, and the one that it has."""


def _in_each_pool(job: Job, question: Question, gang: ElasticGang | None, at: Placement | None) -> Ways:
    rooms = question.usable(question.asks_of(job.name))
    if at is not None:
        rooms = {**rooms, at.pool: question.gpus[at.pool]}
    every = [
        Configuration(name=f"{size} in {pool}", gpus={pool: size}, throughput=speed)
        for pool, room in rooms.items()
        for size, speed in _sizes(job, gang, question.types[pool]).items()
        if size <= room and speed > 0
    ]
    if at is None:
        return every, None
    held = {at.pool: len(at.nodes)}
    now = next((each for each in every if each.gpus == held), None)
    if now is None and (speed := _speed(job, gang, at)) > 0:
        now = Configuration(name=f"{len(at.nodes)} in {at.pool}", gpus=held, throughput=speed)
        every.append(now)
    return every, now


def _over_pools(job: Job, question: Question, at: Placement | None) -> Ways:
    """Ways of a gang in several pools: where it is with its least size, or where it could be."""
    gang = question.mixed.get(job.name)
    if at is not None:
        least = next(iter(gang.smaller(at)), at) if gang is not None else at
        gpus = {pool: len(nodes) for pool, nodes in least.nodes_by_pool.items()}
        speed = gang.speed_at(least) if gang is not None else job.throughput.get(at.gpu_type, 0.0)
        if speed <= 0:
            return [], None
        now = Configuration(name=str(least), gpus=gpus, throughput=speed)
        return [now], now
    if gang is None:  # where it ran it cannot be, and it may no longer be in several pools
        return [], None
    usable = question.usable(NodeRequest(question.asks_of(job.name).barred, gang.per_pod))
    room = {pool: (question.types[pool], gpus) for pool, gpus in usable.items()}
    return [
        Configuration(
            name=" and ".join(map(str, parts)),
            gpus=sum((Counter({part.pool: part.gpus}) for part in parts), Counter[str]()),
            throughput=gang.speed(parts),
        )
        for parts in mixtures(gang, room)
    ], None


def _may_become(size: int, now: int, gang: ElasticGang | None) -> bool:
    if size == now or gang is None or gang.restarts_for(size):
        return size == now
    return gang.may_grow if size > now else gang.may_shrink


def _sizes(job: Job, gang: ElasticGang | None, gpu_type: str) -> dict[int, float]:
    """GPUs -> steps/s, of what it may have there; least sizes are those of all types."""
    rate = job.throughput.get(gpu_type, 0.0)
    if gang is None or rate <= 0:
        return {job.gpus: rate}
    by_size = gang.speeds.get(gpu_type, {})
    return dict(by_size) if job.gpus in by_size else {}


def _speed(job: Job, gang: ElasticGang | None, at: Placement) -> float:
    rate = job.throughput.get(at.gpu_type, 0.0)
    return (gang.speed(at.gpu_type, len(at.nodes)) or rate) if gang is not None and rate > 0 else rate


def grant_multi_pool(question: Question) -> Draft:
    """Decide the round; without gangs that may run in several pools as ``grant_sizes`` does.

    A gang in several pools has whole pods and consecutive ranks in each.
    """
    decided = grant_sizes(question)
    return _Backfill(decided).draft() if question.mixed else decided


def _urgency(question: Question) -> dict[str, float]:
    """Job -> its priority over all columns together, as :func:`.priorities` has it for one."""
    jobs, state = question.jobs, question.state
    received = {job.name: sum(state.received.get(job.name, {}).values()) for job in jobs}
    elapsed = longest_run(question)
    share = np.array([sum(question.shares.get(job.name, {}).values()) for job in jobs])
    promised = np.array([sum(promised_to(question, job.name, elapsed).values()) for job in jobs])
    had = np.array([received[job.name] for job in jobs])
    found = priorities(share, promised, had, round_seconds=question.settings.round_seconds)
    return dict(zip(received, found.tolist(), strict=True))


MOST_GANGS = 64
"""Gangs that are considered in one decision, the most urgent first."""


class _Backfill:
    """The free GPUs of a round, as they are handed out."""

    def __init__(self, decided: Draft) -> None:
        self._q, self._decided, self._urgency = decided.question, decided, _urgency(decided.question)
        self._ledger = Ledger.of(self._q, decided.placements)
        self._pinned = within_min_run(self._q, self._q.state.running)
        self._placements, self._reasons = dict(decided.placements), dict[str, Reason]()

    def draft(self) -> Draft:
        """The round with what gangs take of them; running ones within the moves of the hour."""
        q, changes = self._q, self._decided.changes
        left = moves_left(q) - changes.disturbed
        order = [job.name for job in q.jobs if job.name in q.mixed]
        order.sort(key=lambda name: -self._urgency.get(name, 0.0))
        for name in order[:MOST_GANGS]:
            now, gang = self._placements.get(name), q.mixed[name]
            if name not in q.state.running or name in changes.moved:
                self._start(name, gang, now)
            elif now is not None and gang.may_move and left > 0 and name not in self._pinned:
                left -= self._move(name, gang, now)
        found = self._decided.with_placements(self._placements, self._reasons)
        return fill(found) if self._reasons else found

    def _start(self, name: str, gang: MixedGang, now: Placement | None) -> None:
        here = 0.0 if now is None else self._speed(name, gang, now)
        found = self._found(name, gang, now, above=here * (1 + gang.min_gain))
        if found is None:
            return
        speed = gang.speed_at(found)
        why = f"{found}: no pool has as many free GPUs"
        if not gang.fits_one_pool:
            why = f"{found}: no single pool holds it"
        elif now is not None:
            why = f"{found}: {speed / here:.2f} times as fast as on {now} alone" if here else f"{found}"
        self._place(name, now, found, f"{why}; {speed:.3g} steps/s are predicted")

    def _move(self, name: str, gang: MixedGang, now: Placement) -> bool:
        """Start the gang elsewhere if that pays; True if done."""
        q, here = self._q, self._speed(name, gang, now)
        stays = max(q.settings.round_seconds, q.ran(name))
        worked = 1 - gang.restart_seconds / stays
        if here <= 0 or worked <= 0:
            return False
        above = here * (1 + gang.min_gain) / worked
        found = self._found(name, gang, now, above=above, one_pool=bool(now.parts))
        if found is None:
            return False
        speed = gang.speed_at(found)
        why = f"{found}: {speed / here:.2f} times as fast as on {now}, after a restart"
        self._place(
            name, now, found, f"{why} of {gang.restart_seconds:.0f} s; {speed:.3g} steps/s are predicted"
        )
        return True

    def _speed(self, name: str, gang: MixedGang, now: Placement) -> float:
        """Steps/s where it is placed; of an elastic gang in one pool, what is known of that size."""
        elastic = self._q.elastic.get(name)
        known = elastic.speed(now.gpu_type, len(now.nodes)) if elastic is not None and not now.parts else 0.0
        return known or gang.speed_at(now)

    def _found(
        self, name: str, gang: MixedGang, now: Placement | None, *, above: float, one_pool: bool = False
    ) -> Placement | None:
        """The gang where it is faster than ``above``, on as few nodes that exist as possible."""
        own, tenant, ledger = () if now is None else now.nodes, self._q.tenants.get(name, ""), self._ledger
        ledger.undo(own, tenant)
        nodes, most = open_nodes(gang, ledger), ledger.room_of(tenant)
        kept_for = self._decided.kept_for
        nodes = {
            pool: there
            for pool, there in nodes.items()
            if (kept := kept_for.get(pool, name)) == name or kept in self._placements
        }
        parts = best_parts(gang, room_on(nodes, gang, ledger), above=above, most=most, one_pool=one_pool)
        chosen: list[str] = []
        for part in parts:
            here = pack(part.gpus, nodes[part.pool], ledger.left, gang.per_pod) or ()
            ledger.take(here)
            chosen += here
        ledger.undo(chosen)
        ledger.take(own, tenant)
        if not parts or len(chosen) < sum(part.gpus for part in parts):
            return None
        first, several = parts[0], parts if len(parts) > 1 else ()
        return Placement(gpu_type=first.gpu_type, pool=first.pool, nodes=tuple(chosen), parts=several)

    def _place(self, name: str, now: Placement | None, found: Placement, why: str) -> None:
        tenant = self._q.tenants.get(name, "")
        if now is not None:
            self._ledger.undo(now.nodes, tenant)
        self._ledger.take(found.nodes, tenant)
        self._placements[name], self._reasons[name] = found, Reason(why)
