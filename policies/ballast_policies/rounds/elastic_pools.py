"""Pools of elastic gangs, by the sizes that they would reach there and what a restart costs.

:func:`.grant_gpus` places gangs at their least sizes. At these, the fastest GPUs look best to all of them,
although a gang may be faster on many slower GPUs than on its part of the fast ones. So

- before the round, a running gang claims all of its time where it is (:func:`claims_where_they_run`), so that
  its share at the least size does not move it, unless another gang's place is worth its restart;
- after it, gangs go one at a time to the pool where that wins most in the policy's sense
  (:func:`choose_pools`): those that start at once, those that run where it is worth their restart.

Sizes that gangs would reach in a pool are worked out by counts of GPUs.
"""

import bisect
import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.claims import longest_run, priorities, promised_to
from ballast_policies.rounds.draft import Draft, Reason
from ballast_policies.rounds.ledger import Ledger, in_its_pools, pack
from ballast_policies.rounds.memory import moves_left
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.size_gain import (
    LEAST_GROWTH,
    LEAST_SIZE_GAIN,
    SizeCandidate,
    Speeds,
    gain,
    partition_speed,
    urgency,
)
from ballast_policies.rounds.values import Placement, gpus_by

MOST_GANGS = 10_000
"""Gangs whose size is worked out in one decision, each as often as it is: about half a second of CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PoolCandidate:
    """A gang that is in a pool, or could be.

    Attributes:
        one: the gang on the pool's GPU type.
        sizes: that it may take one after the other, least first; each is faster by enough.
        restart_seconds: from its stop to its first step elsewhere; 0: it does not run.
        stay_seconds: how long it is expected to run undisturbed.
    """

    one: SizeCandidate
    sizes: tuple[int, ...]
    restart_seconds: float = 0.0
    stay_seconds: float = math.inf

    @property
    def least(self) -> int:
        """Its smallest size."""
        return self.sizes[0]

    def speed_after_restart(self, gpus: int) -> float:
        """Mean steps/s over its stay where it has to restart for it."""
        speed = self.one.speed(gpus)
        stay = min(self.stay_seconds, self.one.seconds(speed))
        return speed * max(0.0, 1.0 - self.restart_seconds / max(stay, 1e-9))


def _reachable_sizes(one: SizeCandidate, least: int, most: int) -> tuple[int, ...]:
    """Sizes from ``least`` to ``most`` GPUs, each faster than the one before by ``LEAST_GROWTH``."""
    sizes, fast = [least], one.speed(least)
    for size, speed in sorted(one.gang.speeds.get(one.gpu_type, {}).items()):
        if least < size <= most and speed > fast * (1 + LEAST_GROWTH):
            sizes.append(size)
            fast = speed
    return tuple(sizes)


class _PoolSizes:
    """Pools with the gangs in them, while gangs are tried elsewhere."""

    def __init__(self, gpus: Mapping[str, int], surplus: Surplus) -> None:
        """Start empty; ``gpus``: pool -> those that elastic gangs may have there."""
        self._gpus, self._surplus = dict(gpus), surplus
        self._members: dict[str, dict[str, _PoolCandidate]] = {pool: {} for pool in gpus}
        self._sizes: dict[str, dict[str, int]] = {}
        self._least: Counter[str] = Counter()
        self._about: dict[str, int] = {}
        self._left = MOST_GANGS

    @property
    def exhausted(self) -> bool:
        """True if as many gangs have been examined as one decision has time for."""
        return self._left <= 0

    def gpus(self, pool: str) -> int:
        """GPUs that elastic gangs may have there."""
        return self._gpus[pool]

    def enter(self, pool: str, name: str, candidate: _PoolCandidate) -> None:
        """The gang is in the pool."""
        self._members[pool][name] = candidate
        self._least[pool] += candidate.least
        self._sizes.pop(pool, None)
        self._about.pop(pool, None)

    def leave(self, pool: str, name: str) -> None:
        """The gang is no longer there."""
        self._least[pool] -= self._members[pool].pop(name).least
        self._sizes.pop(pool, None)
        self._about.pop(pool, None)

    def sizes(self, pool: str) -> Mapping[str, int]:
        """Gang -> its size in the pool."""
        if pool not in self._sizes:
            self._sizes[pool] = self._assign_sizes(pool, self._members[pool])
        return self._sizes[pool]

    def idle(self, pool: str) -> int:
        """GPUs of the pool that no gang in it wants."""
        return self._gpus[pool] - sum(self.sizes(pool).values())

    def has_room(self, pool: str, gpus: int) -> bool:
        """True if there are as many GPUs beyond the least sizes of the gangs there."""
        return self._gpus[pool] - self._least[pool] >= gpus

    def typical_size(self, pool: str, candidate: _PoolCandidate) -> int:
        """About the size that the gang would have there, from what is idle and what others have."""
        at = bisect.bisect_right(candidate.sizes, self.about(pool))
        return candidate.sizes[max(0, at - 1)]

    def about(self, pool: str) -> int:
        """GPUs that one more gang would have there, about."""
        if pool not in self._about:
            sizes = self.sizes(pool).values()
            self._about[pool] = max(self.idle(pool), sum(sizes) // max(1, len(sizes)))
        return self._about[pool]

    def gain_of_move(self, name: str, origin: str, target: str, candidate: _PoolCandidate) -> float:
        """Gain of the policy, as a fraction, if the gang goes from one pool to another.

        Counted are all gangs whose speed changes, those that shrink or grow with their pause. -inf where
        there is no room, and where by fairness the worst off of them would be worse off than the worst off
        is now, by more than ``LEAST_SIZE_GAIN``. ``candidate``: the gang as it would be in ``target``.
        """
        if not self.has_room(target, candidate.least):
            return -math.inf
        without = {other: one for other, one in self._members[origin].items() if other != name}
        joined = {**self._members[target], name: candidate}
        changed = [
            *self._changes(without, self.sizes(origin), self._assign_sizes(origin, without)),
            *self._changes(
                self._members[target], self.sizes(target), after := self._assign_sizes(target, joined)
            ),
        ]
        here = self._members[origin][name]
        before = here.one.speed(self.sizes(origin)[name])
        changed.append((candidate.one, before, candidate.speed_after_restart(after[name])))
        if self._surplus is Surplus.LEVEL:
            worst, now = _least_level(changed, after=True), _least_level(changed, after=False)
            if worst < now * (1 - LEAST_SIZE_GAIN):
                return -math.inf
        return gain(self._surplus, changed)

    def _changes(
        self, members: Mapping[str, _PoolCandidate], before: Mapping[str, int], after: Mapping[str, int]
    ) -> Iterable[tuple[SizeCandidate, float, float]]:
        for name, candidate in members.items():
            one = candidate.one
            if before[name] != after[name]:
                stay = max(candidate.stay_seconds, 1e-9)
                worked = max(0.0, 1.0 - one.gang.change_seconds(after[name]) / stay)
                yield one, one.speed(before[name]), one.speed(after[name]) * worked

    def _assign_sizes(self, pool: str, members: Mapping[str, _PoolCandidate]) -> dict[str, int]:
        """Gang -> size: the least for each, then a step at a time for the most urgent."""
        self._left -= len(members) + 1
        sizes = {name: candidate.least for name, candidate in members.items()}
        left = self._gpus[pool] - sum(sizes.values())
        queue: list[tuple[float, int, str]] = []

        def push(name: str, step: int) -> None:
            steps = members[name].sizes
            for more in range(step + 1, len(steps)):
                value = urgency(self._surplus, members[name].one, steps[step], steps[more])
                if value < math.inf:
                    heapq.heappush(queue, (value, more, name))
                    return

        for name in sizes:
            push(name, 0)
        while queue and left > 0:
            _, step, name = heapq.heappop(queue)
            more = members[name].sizes[step]
            if more - sizes[name] <= left:
                left -= more - sizes[name]
                sizes[name] = more
                push(name, step)
        return sizes


def _least_level(changed: Speeds, *, after: bool) -> float:
    return min((late if after else early) / max(one.unit, 1e-12) for one, early, late in changed)


MOST_POOLS_OF_A_TYPE = 2
"""Pools of one GPU type that are considered for each gang."""


class _PoolChoice:
    """The pools with their elastic gangs, and nodes with what is free beyond the least sizes."""

    def __init__(
        self, cluster: Question, reduced: Mapping[str, Placement], placements: Mapping[str, Placement]
    ) -> None:
        """Put the gangs of ``placements`` in.

        ``reduced``: running elastic gangs that may change their size -> placement with their least size.
        """
        self._cluster, self._reduced = cluster, reduced
        self._jobs = {job.name: job for job in cluster.jobs}
        self._index = {job.name: at for at, job in enumerate(cluster.jobs)}
        self._ledger = Ledger(cluster.nodes)
        self._pools = self._ledger.pools
        self._capacity = gpus_by(cluster.nodes, lambda node: node.gpu_type)
        self._parts = cluster.claimed_parts()
        self._units: dict[str, float] = {}
        self._best: list[str] = []
        gpus = gpus_by(cluster.nodes, lambda node: node.pool)
        inside = {}
        self._at: dict[str, Placement] = {}
        for name, placement in placements.items():
            continues = placement == cluster.state.running.get(name)
            least = self._at[name] = reduced.get(name, placement) if continues else placement
            changes = name in cluster.elastic and (name in reduced or not continues) and not placement.parts
            self._ledger.take(least.nodes)
            if changes and name in self._jobs:
                inside[name] = least
                continue
            stays = placement.parts and placement == reduced.get(name)
            holds = cluster.state.running[name] if stays else placement
            for pool, nodes in holds.nodes_by_pool.items():
                if pool in gpus:
                    gpus[pool] -= len(nodes)
        self._pool_sizes = _PoolSizes(gpus, cluster.surplus)
        for name, placement in inside.items():
            candidate = self._candidate(name, placement.pool)
            if candidate is not None:
                self._pool_sizes.enter(placement.pool, name, candidate)
        self._inside = frozenset(inside)

    @property
    def exhausted(self) -> bool:
        """True if there is no time for more."""
        return self._pool_sizes.exhausted

    def movable(self, running: Mapping[str, Placement]) -> dict[str, Placement]:
        """Running gangs that may be restarted elsewhere now -> where they are."""
        cluster = self._cluster
        return {
            name: at
            for name, at in running.items()
            if name in self._reduced
            and name in self._inside
            and name not in cluster.pending
            and cluster.elastic[name].may_move
            and cluster.may_stop(name)
        }

    def wants_place_of_another(self, name: str, pool: str, columns: Collection[str]) -> bool:
        """True if the gang cannot stay, or a full pool of ``columns`` would be worth its restart.

        Pools with room for it are compared by :meth:`moves`.
        """
        here = self._candidate(name, pool)
        if here is None:
            return True
        speed = here.one.speed(self._pool_sizes.sizes(pool)[name])
        for other in self._worth_trying(name):
            if self._cluster.columns.get(other, self._cluster.types[other]) not in columns:
                continue
            there = self._candidate(name, other, from_pool=pool)
            if there is None or self._pool_sizes.gpus(other) < there.least:
                continue
            about = there.speed_after_restart(self._pool_sizes.typical_size(other, there))
            if not self._pool_sizes.has_room(other, there.least) and about >= speed * (1 + LEAST_SIZE_GAIN):
                return True
        return False

    def moves(
        self,
        candidates: Mapping[str, Placement],
        starting: Collection[str],
        kept: Collection[str],
        leaving: Mapping[str, Placement],
    ) -> Iterator[tuple[str, Placement, float]]:
        """(gang, where it goes, what that wins), those that look best first; each is carried out here.

        Args:
            candidates: gangs -> where they are.
            starting: those that need no restart for it.
            kept: pools whose free GPUs are kept for other gangs.
            leaving: gangs that leave where they run -> where that is, with their least size; they may stay.
        """
        found = []
        for name, at in candidates.items():
            # One that is begun again where it is, such as in the halves of its pool, keeps its size and pool.
            here = self._candidate(name, at.pool) if name in self._inside else None
            if here is None:
                continue
            speed = here.one.speed(self._pool_sizes.sizes(at.pool)[name])
            chosen = here.one.gang.wanted is not None
            if self._cluster.surplus is Surplus.COST and (chosen or not here.one.is_late(speed)):
                continue
            for pool in (leaving[name].pool,) if name in leaving else self._worth_trying(name):
                if pool == at.pool or pool in kept or not self._pool_sizes.has_room(pool, here.least):
                    continue
                no_restart = name in starting or name in leaving
                there = self._candidate(name, pool, from_pool="" if no_restart else at.pool)
                if there is not None:
                    about = there.speed_after_restart(self._pool_sizes.typical_size(pool, there))
                    found.append((-about / max(speed, 1e-12), self._index[name], pool, name, there))
        self._best = []  # after these moves other pools are
        gone = set()
        for _, _, pool, name, there in sorted(found, key=lambda entry: entry[:3]):
            if self._pool_sizes.exhausted:
                break
            if name in gone:
                continue
            wins = self._pool_sizes.gain_of_move(name, candidates[name].pool, pool, there)
            if wins < (LEAST_GROWTH if name in starting else LEAST_SIZE_GAIN):
                continue
            if name not in leaving:
                placement = self._packed(name, pool, there.least)
            else:
                placement = leaving[name] if self._ledger.holds(leaving[name].nodes) else None
            if placement is not None:
                gone.add(name)
                self._move(name, placement)
                yield name, placement, wins

    def _worth_trying(self, name: str) -> Sequence[str]:
        """Pools for the gang: those of each GPU type in which it would have most, or all of a few."""
        if len(self._pools) <= MOST_POOLS_OF_A_TYPE or self._cluster.asks_of(name).barred:
            return tuple(self._pools)
        if not self._best:
            by_type: dict[str, list[str]] = {}
            for pool, gpu_type in self._cluster.types.items():
                by_type.setdefault(gpu_type, []).append(pool)
            for pools in by_type.values():
                pools.sort(key=lambda pool: (-self._pool_sizes.about(pool), pool))
                self._best += pools[:MOST_POOLS_OF_A_TYPE]
        return self._best

    def _move(self, name: str, placement: Placement) -> None:
        """The gang is there from now on, at its least size."""
        before = self._at[name]
        self._ledger.undo(before.nodes)
        self._ledger.take(placement.nodes)
        self._at[name] = placement
        self._pool_sizes.leave(before.pool, name)
        candidate = self._candidate(name, placement.pool)
        assert candidate is not None
        self._pool_sizes.enter(placement.pool, name, candidate)

    def _packed(self, name: str, pool: str, gpus: int) -> Placement | None:
        asks = self._cluster.asks_of(name)
        members = asks.open(self._pools[pool])
        nodes = pack(gpus, members, self._ledger.left, asks.per_pod, asks.topology)
        return (
            None if nodes is None else Placement(gpu_type=self._cluster.types[pool], pool=pool, nodes=nodes)
        )

    def _candidate(self, name: str, pool: str, *, from_pool: str = "") -> _PoolCandidate | None:
        """The gang in the pool, coming from another one by a restart or not; None: it cannot be there."""
        cluster, job, gang = self._cluster, self._jobs[name], self._cluster.elastic[name]
        gpu_type = cluster.types.get(pool, "")
        by_size = gang.speeds.get(gpu_type)
        if not by_size or job.throughput.get(gpu_type, 0.0) <= 0:
            return None
        least = job.gpus
        if least not in by_size:
            at = self._at.get(name)
            if at is None or at.pool != pool:
                return None
            least = len(at.nodes)
        if name not in self._units:
            self._units[name] = partition_speed(gang, self._capacity, self._parts.get(name, 0.0))
        one = SizeCandidate(
            job=job, gang=gang, index=self._index[name], gpu_type=gpu_type, unit=self._units[name]
        )
        most = cluster.usable(cluster.asks_of(name))[pool]
        tenant = cluster.tenants.get(name, "")
        if tenant in cluster.room:
            most = min(most, least + max(0, cluster.room[tenant]))
        runs = name in cluster.state.running
        # A size is expected to last a round; a restart, as long as the gang has been where it is.
        stay = max(cluster.settings.round_seconds, cluster.ran(name) if runs else 0.0)
        return _PoolCandidate(
            one=one,
            sizes=_reachable_sizes(one, least, max(most, least)),
            restart_seconds=gang.restart_seconds if runs and from_pool else 0.0,
            stay_seconds=stay,
        )


MOST_SWEEPS = 4
"""Passes over the gangs: one that has moved leaves room for others."""


def claims_where_they_run(cluster: Question, reduced: Mapping[str, Placement]) -> Question:
    """The question in which gangs that want no other's place have all of their time where they run."""
    state, shares = cluster.state, cluster.shares
    if (
        len({node.pool for node in cluster.nodes}) < 2
        or cluster.settings.within_round
        or cluster.surplus is Surplus.COST
    ):
        return cluster
    running = {name: at for name, at in cluster.holders.items() if in_its_pools(at, cluster.nodes_by_name)}
    choice = _PoolChoice(cluster, reduced, running)
    staying, elapsed = dict[str, tuple[str, Collection[str]]](), longest_run(cluster)
    jobs = {job.name: job for job in cluster.jobs}
    for name, at in choice.movable(running).items():
        column = cluster.columns.get(at.pool, at.gpu_type)
        elsewhere = {other for other, share in shares.get(name, {}).items() if share > 0 and other != column}
        if not choice.wants_place_of_another(name, at.pool, elsewhere):
            staying[name] = column, _columns_claimed(cluster, name, column, elapsed)
            # Of a gang's claims without a share the one on its fastest type is first.
            rates = jobs[name].throughput
            rates = {**rates, at.gpu_type: max(rates.values())}
            jobs[name] = dataclasses.replace(jobs[name], throughput=rates)
    if not staying:
        return cluster

    def all_there(rows: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
        return {**rows, **{name: _all_in(rows.get(name, {}), *there) for name, there in staying.items()}}

    promised = None if state.promised is None else all_there(state.promised)
    state = dataclasses.replace(state, received=all_there(state.received), promised=promised)
    return dataclasses.replace(cluster, jobs=[*jobs.values()], shares=all_there(shares), state=state)


def _columns_claimed(cluster: Question, name: str, column: str, elapsed: float) -> Collection[str]:
    """Columns whose time a gang claims in ``column``: only its own if it is more urgent by that alone.

    A gang would else lose by running there what it was granted, and get it back in the next round.
    """
    received = cluster.state.received.get(name, {})
    rows = cluster.shares.get(name, {}), promised_to(cluster, name, elapsed), received
    own, every = priorities(
        *np.array([[row.get(column, 0.0), sum(row.values())] for row in rows]),
        round_seconds=cluster.settings.round_seconds,
    )
    return {column} if own > every else {column}.union(*rows)


def _all_in(row: Mapping[str, float], column: str, claimed: Collection[str]) -> dict[str, float]:
    there = sum(value for one, value in row.items() if one in claimed)
    return {**dict.fromkeys(row, 0.0), column: there}


def choose_pools(cluster: Question, reduced: Mapping[str, Placement], decided: Draft) -> Draft:
    """The round with elastic gangs in the pools where they are worth most; the same gangs run."""
    if len({node.pool for node in cluster.nodes}) < 2:
        return decided
    choice, changes = _PoolChoice(cluster, reduced, decided.placements), decided.changes
    may_start = {
        name: at
        for name, at in decided.placements.items()
        if name in changes.started and name in cluster.elastic and name not in cluster.pending
    }
    may_move = {}
    if not cluster.settings.within_round:
        may_move = choice.movable({n: at for n, at in decided.placements.items() if n in changes.extended})
    # What the next round would move back stays.
    leaving = {
        name: reduced[name]
        for name in changes.moved
        if name in reduced and name not in cluster.pending and not reduced[name].parts
        if in_its_pools(reduced[name], cluster.nodes_by_name)
    }
    may_stay = {name: decided.placements[name] for name in leaving}
    left = moves_left(cluster) - changes.disturbed
    chosen: dict[str, tuple[Placement, float]] = {}
    for _ in range(MOST_SWEEPS):
        candidates = {**may_start, **may_stay, **(may_move if left > 0 else {})}
        candidates = {name: at for name, at in candidates.items() if name not in chosen}
        before = len(chosen)
        for name, placement, won in choice.moves(
            candidates, may_start.keys(), decided.kept_for.keys(), leaving
        ):
            chosen[name] = placement, won
            left += (name in leaving) - (name in may_move)
            if left <= 0 and name in may_move:
                break
        if len(chosen) == before or choice.exhausted:
            break
    return _with_choices(decided, chosen, cluster) if chosen else decided


def _with_choices(decided: Draft, chosen: Mapping[str, tuple[Placement, float]], cluster: Question) -> Draft:
    placements = {name: placement for name, (placement, _) in chosen.items()}
    running, reasons = set(decided.changes.extended), {}
    for name, (placement, won) in chosen.items():
        before = decided.placements[name]
        restart = ""
        if name in running:
            restart = f" after a restart of {cluster.elastic[name].restart_seconds:.0f} s"
        reasons[name] = Reason(
            f"in pool {placement.pool}: with the sizes that gangs reach, {won:.0%} better by the policy "
            f"than in pool {before.pool}{restart}"
        )
    return decided.with_placements(placements, reasons)
