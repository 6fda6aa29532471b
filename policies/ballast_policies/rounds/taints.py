"""Nodes that some jobs may not be started on: selection where a pool's nodes are not alike to every job.

A job that does not tolerate a node's taints is not started there, and no job on a closed node; gangs that
run there stay. Nodes of a pool that are alike to every job are a group (``Node.group``): claims are granted
by the GPUs left in each group.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.claims import Pools
from ballast_policies.rounds.selection import Claims
from ballast_policies.rounds.values import Node, Placement

Split = Mapping[str, int]
"""Group of nodes -> GPUs of a gang in it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of nodes of all pools.

    Attributes:
        room: for each pool, in their order: group -> GPUs.
        barred: job index -> groups on which the job must not be started.
        held: job index -> (pool index, split), of running jobs that could continue where they are.
        per_pod: job index -> GPUs of each of its pods, where it is not 1.
        order: all groups, those that fewest jobs may use first: they are of least use to the others.
    """

    room: Sequence[Mapping[str, int]]
    barred: Mapping[int, frozenset[str]]
    held: Mapping[int, tuple[int, Split]]
    order: tuple[str, ...]
    per_pod: Mapping[int, int]

    @classmethod
    def of(
        cls,
        jobs: Sequence[Job],
        nodes: Sequence[Node],
        pools: Pools,
        valid: Mapping[str, Placement],
        not_tolerated: Mapping[str, frozenset[str]],
        gpus_per_pod: Mapping[str, int],
    ) -> Self | None:
        """The groups; None where every job tolerates every node, so that pools are enough."""
        present = {node.group for node in nodes if node.gpus > 0}
        closed = frozenset(node.group for node in nodes if node.gpus > 0 and node.closed)
        barred = {
            index: texts
            for index, job in enumerate(jobs)
            if (texts := (not_tolerated.get(job.name, frozenset()) & present) | closed)
        }
        if not barred:
            return None
        column = {name: at for at, name in enumerate(pools.names)}
        room: list[Counter[str]] = [Counter() for _ in pools.names]
        group = {node.name: node.group for node in nodes}
        for node in nodes:
            room[column[node.pool]][node.group] += node.gpus
        held = {
            index: (column[valid[job.name].pool], Counter(group[name] for name in valid[job.name].nodes))
            for index, job in enumerate(jobs)
            if job.name in valid
        }
        refusals = Counter(text for texts in barred.values() for text in texts)
        order = tuple(sorted(present, key=lambda text: (-refusals[text], text)))
        per_pod = {
            index: gpus_per_pod[job.name] for index, job in enumerate(jobs) if job.name in gpus_per_pod
        }
        return cls(room=room, barred=barred, held=held, order=order, per_pod=per_pod)

    def select(self, claims: Claims, pinned: Iterable[int]) -> tuple[np.ndarray, dict[int, Split]]:
        """As ``selection.select``, by groups; also the split of each job that starts or moves.

        Args:
            claims: the most urgent first; without pairs.
            pinned: jobs, by index, that keep their nodes before any claim is granted.
        """
        left = [Counter(groups) for groups in self.room]
        for job in pinned:
            column, own = self.held[job]
            left[column].subtract(own)
        taken: set[int] = set()
        granted: list[int] = []
        splits: dict[int, Split] = {}
        rows = zip(claims.job.tolist(), claims.column.tolist(), claims.gpus.tolist(), strict=True)
        for position, (job, column, gpus) in enumerate(rows):
            if job in taken:
                continue
            at, own = self.held.get(job, (-1, {}))
            if at == column and all(left[column][text] >= count for text, count in own.items()):
                split = own
            else:
                found = self._split(job, gpus, left[column])
                if found is None:
                    continue
                splits[job] = split = found
            left[column].subtract(split)
            taken.add(job)
            granted.append(position)
        return np.array(granted, dtype=np.int64), splits

    def _split(self, job: int, gpus: int, left: Mapping[str, int]) -> Split | None:
        """GPUs for a gang that starts, from the groups that it tolerates; None: too few are left."""
        barred, split, missing = self.barred.get(job, frozenset()), {}, gpus
        per_pod = self.per_pod.get(job, 1)
        for text in self.order:
            here = min(missing, left.get(text, 0)) // per_pod * per_pod if text not in barred else 0
            if here > 0:
                split[text] = here
                missing -= here
        return split if missing == 0 else None
