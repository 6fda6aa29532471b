"""Sizes that elastic gangs would reach in a pool, by counts of GPUs: what choosing a pool is decided on."""

import bisect
import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.gangs import SizeSettings
from ballast_policies.rounds.sizes.worth import Contender, Speeds, gain, urgency

MOST_GANGS = 10_000
"""Gangs whose size is worked out in one decision, each as often as it is: about half a second of CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A gang that is in a pool, or could be.

    Attributes:
        one: the gang on the pool's GPU type.
        ladder: sizes that it may take one after the other, least first; each is faster by enough.
        restart_seconds: from its stop to its first step elsewhere; 0: it does not run.
        stay_seconds: how long it is expected to run undisturbed.
    """

    one: Contender
    ladder: tuple[int, ...]
    restart_seconds: float = 0.0
    stay_seconds: float = math.inf

    @property
    def least(self) -> int:
        """Its smallest size."""
        return self.ladder[0]

    def speed_after_restart(self, gpus: int) -> float:
        """Mean steps/s over its stay where it has to restart for it."""
        speed = self.one.speed(gpus)
        stay = min(self.stay_seconds, self.one.seconds(speed))
        if self.restart_seconds <= 0 or stay <= 0:
            return speed if self.restart_seconds <= 0 else 0.0
        return speed * max(0.0, 1.0 - self.restart_seconds / stay)


def ladder(one: Contender, least: int, most: int, settings: SizeSettings) -> tuple[int, ...]:
    """Sizes from ``least`` to ``most`` GPUs, each faster than the one before by ``settings.least_growth``."""
    sizes, fast = [least], one.speed(least)
    for size, speed in sorted(one.gang.speeds.get(one.gpu_type, {}).items()):
        if least < size <= most and speed > fast * (1 + settings.least_growth):
            sizes.append(size)
            fast = speed
    return tuple(sizes)


class PoolReach:
    """Pools with the gangs in them, while gangs are tried elsewhere."""

    def __init__(self, gpus: Mapping[str, int], settings: SizeSettings) -> None:
        """Start empty.

        Args:
            gpus: pool -> GPUs that elastic gangs may have there.
            settings: of sizes.
        """
        self._gpus, self._settings = dict(gpus), settings
        self._members: dict[str, dict[str, Entrant]] = {pool: {} for pool in gpus}
        self._sizes: dict[str, dict[str, int]] = {}
        self._least: Counter[str] = Counter()
        self._about: dict[str, int] = {}
        self._left = MOST_GANGS

    @property
    def exhausted(self) -> bool:
        """Whether as many gangs have been worked out as one decision has time for."""
        return self._left <= 0

    def gpus(self, pool: str) -> int:
        """GPUs that elastic gangs may have there."""
        return self._gpus[pool]

    def enter(self, pool: str, name: str, entrant: Entrant) -> None:
        """The gang is in the pool."""
        self._members[pool][name] = entrant
        self._least[pool] += entrant.least
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
            self._sizes[pool] = self._shared_out(pool, self._members[pool])
        return self._sizes[pool]

    def idle(self, pool: str) -> int:
        """GPUs of the pool that no gang in it wants."""
        return self._gpus[pool] - sum(self.sizes(pool).values())

    def has_room(self, pool: str, gpus: int) -> bool:
        """Whether there are as many GPUs beyond the least sizes of the gangs there."""
        return self._gpus[pool] - self._least[pool] >= gpus

    def typical_size(self, pool: str, entrant: Entrant) -> int:
        """About the size that the gang would have there, from what is idle and what others have."""
        at = bisect.bisect_right(entrant.ladder, self.about(pool))
        return entrant.ladder[max(0, at - 1)]

    def about(self, pool: str) -> int:
        """GPUs that one more gang would have there, about."""
        if pool not in self._about:
            sizes = self.sizes(pool).values()
            self._about[pool] = max(self.idle(pool), sum(sizes) // max(1, len(sizes)))
        return self._about[pool]

    def wins(self, name: str, origin: str, target: str, entrant: Entrant) -> float:
        """What the policy wins, as a fraction, if the gang goes from one pool to another.

        Counted are all gangs whose speed changes, those that shrink or grow with their pause. -inf where
        there is no room, and where by fairness the worst off of them would be worse off than the worst off
        is now, by more than ``least_gain``.

        Args:
            name: the gang.
            origin: the pool that it is in.
            target: the other pool.
            entrant: the gang as it would be there.
        """
        if not self.has_room(target, entrant.least):
            return -math.inf
        without = {other: one for other, one in self._members[origin].items() if other != name}
        joined = {**self._members[target], name: entrant}
        changed = [
            *self._changes(without, self.sizes(origin), self._shared_out(origin, without)),
            *self._changes(
                self._members[target], self.sizes(target), after := self._shared_out(target, joined)
            ),
        ]
        here = self._members[origin][name]
        before = here.one.speed(self.sizes(origin)[name])
        changed.append((entrant.one, before, entrant.speed_after_restart(after[name])))
        if self._settings.surplus is Surplus.LEVEL:
            worst, now = _least_level(changed, after=True), _least_level(changed, after=False)
            if worst < now * (1 - self._settings.least_gain):
                return -math.inf
        return gain(self._settings.surplus, changed)

    def _changes(
        self, members: Mapping[str, Entrant], before: Mapping[str, int], after: Mapping[str, int]
    ) -> Iterable[tuple[Contender, float, float]]:
        for name, entrant in members.items():
            one = entrant.one
            if before[name] != after[name]:
                stay = max(entrant.stay_seconds, 1e-9)
                worked = max(0.0, 1.0 - one.gang.pause_seconds / stay)
                yield one, one.speed(before[name]), one.speed(after[name]) * worked

    def _shared_out(self, pool: str, members: Mapping[str, Entrant]) -> dict[str, int]:
        """Gang -> size: the least for each, then a step at a time for the most urgent."""
        self._left -= len(members) + 1
        sizes = {name: entrant.least for name, entrant in members.items()}
        left = self._gpus[pool] - sum(sizes.values())
        surplus = self._settings.surplus
        queue: list[tuple[float, int, str]] = []

        def push(name: str, step: int) -> None:
            steps = members[name].ladder
            if step + 1 < len(steps):
                value = urgency(surplus, members[name].one, steps[step], steps[step + 1])
                if value < math.inf:
                    heapq.heappush(queue, (value, step, name))

        for name in sizes:
            push(name, 0)
        while queue and left > 0:
            _, step, name = heapq.heappop(queue)
            more = members[name].ladder[step + 1]
            if more - sizes[name] <= left:
                left -= more - sizes[name]
                sizes[name] = more
                push(name, step + 1)
        return sizes


def _least_level(changed: Speeds, *, after: bool) -> float:
    return min((late if after else early) / max(one.unit, 1e-12) for one, early, late in changed)
