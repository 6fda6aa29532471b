"""Pools with the elastic gangs in them: which move of a gang to another pool the policy wins by."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.packing import pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.sizes.reach import Entrant, PoolReach, ladder
from ballast_policies.rounds.sizes.worth import Contender, partition_speed
from ballast_policies.rounds.values import Node, Placement

MOST_POOLS_OF_A_TYPE = 2
"""Of a GPU type, this many pools are considered for each gang."""


class Market:
    """The pools with their elastic gangs, and nodes with what is free beyond the least sizes."""

    def __init__(
        self, cluster: Question, reduced: Mapping[str, Placement], placements: Mapping[str, Placement]
    ) -> None:
        """Put the gangs of ``placements`` in.

        Args:
            cluster: the question.
            reduced: running elastic gangs that may change their size -> placement with their least size.
            placements: job -> where it is to be.
        """
        self._cluster, self._reduced = cluster, reduced
        self._jobs = {job.name: job for job in cluster.jobs}
        self._index = {job.name: at for at, job in enumerate(cluster.jobs)}
        self._types = {node.pool: node.gpu_type for node in cluster.nodes}
        self._pools: dict[str, list[Node]] = {}
        for node in cluster.nodes:
            self._pools.setdefault(node.pool, []).append(node)
        self._capacity: Counter[str] = Counter()
        for node in cluster.nodes:
            self._capacity[node.gpu_type] += node.gpus
        self._parts = cluster.claimed_parts()
        self._units: dict[str, float] = {}
        self._best: list[str] = []
        self._open: dict[tuple[str, frozenset[str]], int] = {}
        self._free = {node.name: node.gpus for node in cluster.nodes}
        gpus = {pool: sum(node.gpus for node in nodes) for pool, nodes in self._pools.items()}
        inside = {}
        self._at: dict[str, Placement] = {}
        for name, placement in placements.items():
            continues = placement == cluster.state.running.get(name)
            least = self._at[name] = reduced.get(name, placement) if continues else placement
            changes = name in cluster.elastic and (name in reduced or not continues)
            for node_name in least.nodes:
                if node_name in self._free:
                    self._free[node_name] -= 1
            if changes and name in self._jobs:
                inside[name] = least
            elif placement.pool in gpus:
                gpus[placement.pool] -= len(placement.nodes)
        self._reach = PoolReach(gpus, cluster.sizes)
        for name, placement in inside.items():
            entrant = self._entrant(name, placement.pool)
            if entrant is not None:
                self._reach.enter(placement.pool, name, entrant)
        self._inside = frozenset(inside)

    @property
    def exhausted(self) -> bool:
        """Whether there is no time for more."""
        return self._reach.exhausted

    def movable(self, running: Mapping[str, Placement]) -> dict[str, Placement]:
        """Those of the running gangs that may be restarted elsewhere now -> where they are."""
        cluster = self._cluster
        return {
            name: at
            for name, at in running.items()
            if name in self._reduced
            and name in self._inside
            and name not in cluster.pending
            and cluster.elastic[name].may_move
            and self._ran(name) >= cluster.settings.min_run_seconds
        }

    def is_best_off(self, name: str, pool: str, columns: Collection[str]) -> bool:
        """Whether no other pool would win enough to move the gang there.

        Args:
            name: the gang.
            pool: where it is.
            columns: where it has a share of time.
        """
        here = self._entrant(name, pool)
        if here is None:
            return False
        speed = here.one.speed(self._reach.sizes(pool)[name])
        for other in self._worth_trying(name):
            column = self._cluster.columns.get(other, self._types[other])
            there = None
            if other != pool and column in columns:
                there = self._entrant(name, other, from_pool=pool)
            if there is None or self._reach.gpus(other) < there.least:
                continue
            if self._reach.exhausted or not self._reach.has_room(other, there.least):
                # It would take the place of another one, or there is no time to compute its size there.
                about = self._reach.typical_size(other, there)
                wins = there.speed_after_restart(about) / max(speed, 1e-12) - 1.0
            else:
                wins = self._reach.wins(name, pool, other, there)
            if wins >= self._cluster.sizes.least_gain:
                return False
        return True

    def moves(
        self, candidates: Mapping[str, Placement], starting: Collection[str]
    ) -> Iterator[tuple[str, Placement, float]]:
        """(gang, where it goes, what that wins), those that look best first; each is carried out here.

        Args:
            candidates: gangs -> where they are.
            starting: those that need no restart for it.
        """
        sizes = self._cluster.sizes
        found = []
        for name, at in candidates.items():
            here = self._entrant(name, at.pool)
            if here is None:
                continue
            speed = here.one.speed(self._reach.sizes(at.pool)[name])
            if sizes.surplus is Surplus.COST and not here.one.is_late(speed):
                continue
            for pool in self._worth_trying(name):
                if pool == at.pool or not self._reach.has_room(pool, here.least):
                    continue
                there = self._entrant(name, pool, from_pool="" if name in starting else at.pool)
                if there is not None:
                    about = there.speed_after_restart(self._reach.typical_size(pool, there))
                    found.append((-about / max(speed, 1e-12), self._index[name], pool, name, there))
        self._best = []  # after these moves other pools are
        gone = set()
        for _, _, pool, name, there in sorted(found, key=lambda entry: entry[:3]):
            if self._reach.exhausted:
                break
            if name in gone:
                continue
            wins = self._reach.wins(name, candidates[name].pool, pool, there)
            if wins < (sizes.least_growth if name in starting else sizes.least_gain):
                continue
            placement = self._packed(name, pool, there.least)
            if placement is not None:
                gone.add(name)
                self._move(name, placement)
                yield name, placement, wins

    def _worth_trying(self, name: str) -> Sequence[str]:
        """Pools for the gang: those of each GPU type in which it would have most, or all of a few."""
        if len(self._pools) <= MOST_POOLS_OF_A_TYPE or self._cluster.not_tolerated.get(name):
            return tuple(self._pools)
        if not self._best:
            by_type: dict[str, list[str]] = {}
            for pool, gpu_type in self._types.items():
                by_type.setdefault(gpu_type, []).append(pool)
            for pools in by_type.values():
                pools.sort(key=lambda pool: (-self._reach.about(pool), pool))
                self._best += pools[:MOST_POOLS_OF_A_TYPE]
        return self._best

    def _move(self, name: str, placement: Placement) -> None:
        """The gang is there from now on, at its least size."""
        before = self._at[name]
        for node in before.nodes:
            self._free[node] += 1
        for node in placement.nodes:
            self._free[node] -= 1
        self._at[name] = placement
        self._reach.leave(before.pool, name)
        entrant = self._entrant(name, placement.pool)
        assert entrant is not None
        self._reach.enter(placement.pool, name, entrant)

    def _packed(self, name: str, pool: str, gpus: int) -> Placement | None:
        barred = self._cluster.not_tolerated.get(name, frozenset())
        members = [node for node in self._pools[pool] if not node.closed and node.group not in barred]
        nodes = pack(gpus, members, self._free, self._cluster.gpus_per_pod.get(name, 1))
        return None if nodes is None else Placement(gpu_type=self._types[pool], pool=pool, nodes=nodes)

    def _open_gpus(self, pool: str, barred: frozenset[str]) -> int:
        """GPUs of nodes on which a gang that does not tolerate ``barred`` may be started."""
        if (pool, barred) not in self._open:
            nodes = (node for node in self._pools[pool] if not node.closed and node.group not in barred)
            self._open[pool, barred] = sum(node.gpus for node in nodes)
        return self._open[pool, barred]

    def _ran(self, name: str) -> float:
        return self._cluster.now - self._cluster.state.running_since.get(name, self._cluster.now)

    def _entrant(self, name: str, pool: str, *, from_pool: str = "") -> Entrant | None:
        """The gang in the pool, coming from another one by a restart or not; None: it cannot be there."""
        cluster, job, gang = self._cluster, self._jobs[name], self._cluster.elastic[name]
        gpu_type = self._types.get(pool, "")
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
        one = Contender(
            job=job, gang=gang, index=self._index[name], gpu_type=gpu_type, unit=self._units[name]
        )
        most = self._open_gpus(pool, cluster.not_tolerated.get(name, frozenset()))
        tenant = cluster.tenants.get(name, "")
        if tenant in cluster.room:
            most = min(most, least + max(0, cluster.room[tenant]))
        runs = name in cluster.state.running
        stay = max(
            cluster.sizes.stay_rounds * cluster.settings.round_seconds, self._ran(name) if runs else 0.0
        )
        return Entrant(
            one=one,
            ladder=ladder(one, least, max(most, least), cluster.sizes),
            restart_seconds=gang.restart_seconds if runs and from_pool else 0.0,
            stay_seconds=stay,
        )
