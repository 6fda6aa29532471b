"""Sharing out: GPUs beyond the least sizes go to gangs one step at a time, by the policy's urgency."""

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ballast_policies.rounds.gangs import SizeSettings
from ballast_policies.rounds.sizes.free_gpus import FreeGpus
from ballast_policies.rounds.sizes.worth import Contender, urgency
from ballast_policies.rounds.values import Placement

HOLDS = 0.85
"""What a gang holds already counts as if it were so much more urgent: equal gangs do not swap GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A gang with its least size, and what it has beyond that now.

    Attributes:
        one: the gang.
        base: nodes of its least size.
        own: by position of the pipeline, the nodes beyond ``base`` that it holds now, in order of ranks.
        runs: its ranks hold them; a gang that is about to start takes any size at no cost.
        pool: where.
        barred: groups of nodes that it must not be started on.
        tenant: whose limit on GPUs counts.
    """

    one: Contender
    base: Placement
    own: tuple[tuple[str, ...], ...] = ()
    runs: bool = False
    barred: frozenset[str] = frozenset()
    tenant: str = ""

    @property
    def held(self) -> int:
        """GPUs that it has now."""
        return len(self.base.nodes) + sum(map(len, self.own))


class Division:
    """One division of the free GPUs, as it comes about."""

    def __init__(
        self, seats: Sequence[Seat], free: FreeGpus, room: Mapping[str, int], settings: SizeSettings
    ) -> None:
        """Start from the least sizes.

        Args:
            seats: the gangs.
            free: GPUs beyond the least sizes.
            room: tenant -> GPUs that its gangs may have beyond their least sizes; missing: no limit.
            settings: of sizes.
        """
        self._free, self._room, self._settings = free, Counter(room), settings
        self._limited = frozenset(room)
        self._seats = seats
        self.nodes: list[tuple[str, ...]] = [seat.base.nodes for seat in seats]
        self._kept: list[set[int]] = [set() for _ in seats]

    def keep_what_is_held(self, wanted: Iterable[int]) -> None:
        """Let these gangs keep their own GPUs beyond the least size, where they are still free."""
        for at in wanted:
            seat = self._seats[at]
            most = sum(map(len, seat.own))
            while most > 0:
                nodes, positions = self._own_positions(at, most)
                if not nodes:
                    break
                if self._is_a_size(seat, self.size(at) + len(nodes)) and self._has_room(seat, len(nodes)):
                    self._take(at, nodes)
                    self._kept[at] |= positions
                    break
                most = len(nodes) - 1

    def share_out(self) -> None:
        """Give the rest to those that become faster with it, the most urgent first."""
        queue: list[tuple[float, int, int]] = []
        for at in range(len(self._seats)):
            self._push(queue, at)
        while queue:
            _, _, at = heapq.heappop(queue)
            if self._grow(at):
                self._push(queue, at)

    def size(self, at: int) -> int:
        """GPUs of the gang in this division."""
        return len(self.nodes[at])

    def _push(self, queue: list[tuple[float, int, int]], at: int) -> None:
        seat, now = self._seats[at], self.size(at)
        more = self._next_size(seat, now)
        if more is None:
            return
        value = urgency(self._settings.surplus, seat.one, now, more)
        if math.isinf(value) and value > 0:
            return
        if seat.runs and more <= seat.held:
            value = value * HOLDS if value > 0 else value / HOLDS
        # Of equals the one that holds the GPU keeps it.
        heapq.heappush(queue, (value, 0 if seat.runs and more <= seat.held else 1, at))

    def _next_size(self, seat: Seat, now: int) -> int | None:
        """The next size at which the gang is faster by enough; None: there is none."""
        one, slow = seat.one, seat.one.speed(now)
        for size in sorted(one.gang.speeds.get(one.gpu_type, {})):
            if size > now and one.speed(size) > slow * (1 + self._settings.least_growth):
                return self._worth_its_pause(seat, now, size)
        return None

    def _worth_its_pause(self, seat: Seat, now: int, size: int) -> int | None:
        if not seat.runs or size <= seat.held:
            return size
        if not seat.one.gang.may_grow:
            return None
        saved = seat.one.seconds(seat.one.speed(now)) - seat.one.seconds(seat.one.speed(size))
        return size if saved > seat.one.gang.pause_seconds else None

    def _grow(self, at: int) -> bool:
        seat, now = self._seats[at], self.size(at)
        size = self._next_size(seat, now)
        if size is None or not self._has_room(seat, size - now):
            return False
        nodes, positions = self._own_positions(at, size - now)
        missing = size - now - len(nodes)
        if missing:
            # Positions that others have got are given back before the gang may take other GPUs.
            if seat.runs and len(self._kept[at]) + len(positions) < len(seat.own):
                return False
            self._free.take(nodes)
            found = self._free.find(
                missing, seat.base.pool, (*self.nodes[at], *nodes), seat.barred, seat.one.gang.per_pod
            )
            self._free.give_back(nodes)
            if found is None:
                return False
            nodes = (*nodes, *found)
        self._take(at, nodes)
        self._kept[at] |= positions
        return True

    def _own_positions(self, at: int, gpus: int) -> tuple[tuple[str, ...], set[int]]:
        """(nodes, numbers) of positions that the gang holds and has not yet, as far as they are free.

        In order of ranks, and no more than ``gpus`` GPUs.
        """
        nodes: list[str] = []
        positions: set[int] = set()
        for number, position in enumerate(self._seats[at].own):
            fits = number not in self._kept[at] and len(nodes) + len(position) <= gpus
            if fits and self._free.holds([*nodes, *position]):
                nodes += position
                positions.add(number)
        return tuple(nodes), positions

    def _is_a_size(self, seat: Seat, gpus: int) -> bool:
        return gpus in seat.one.gang.speeds.get(seat.one.gpu_type, {})

    def _has_room(self, seat: Seat, gpus: int) -> bool:
        tenant = seat.tenant
        return tenant not in self._limited or self._room[tenant] >= gpus

    def _take(self, at: int, nodes: tuple[str, ...]) -> None:
        self._free.take(nodes)
        self.nodes[at] = (*self.nodes[at], *nodes)
        tenant = self._seats[at].tenant
        if tenant in self._limited:
            self._room[tenant] -= len(nodes)
