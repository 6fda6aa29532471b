"""Nodes on which the jobs of a snapshot may be started.

By taints, node selectors, the CPUs and memory that their pods ask for, and what happened there.

Jobs with the same template, and nodes that are alike, are looked at once: there may be thousands.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from ballast_policies.rounds.draft import TOLD_APART

from ballast_operator.api.node_pool import NodePool
from ballast_operator.views.job import JobView
from ballast_operator.views.node_constraints import NodeRequirements, Taint, blocking
from ballast_operator.views.nodes import NodeView, PodNeed

Signature = tuple[str, NodeRequirements, PodNeed, frozenset[str]]
"""Tolerations as JSON, requirements, what the pods ask for, and nodes to avoid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Groups of nodes that are alike to every job, and the groups on which each job may not be started.

    Attributes:
        taints: node -> text, equal for nodes that are alike to every job: the taints that a template may
            have to tolerate, and a number where something else tells nodes with the same taints apart.
        not_tolerated: what jobs have in common (:func:`_signature`) -> texts of nodes barred to them.
        by_no_job: texts of nodes that are barred to every job; empty where there are no jobs.
        too_full: what pods ask for -> (nodes without room for them, pool -> these as text).
    """

    taints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_tolerated: Mapping[Signature, frozenset[str]] = dataclasses.field(default_factory=dict)
    by_no_job: frozenset[str] = frozenset()
    too_full: Mapping[PodNeed, tuple[frozenset[str], Mapping[str, str]]] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        pools: Sequence[NodePool],
        members: Mapping[str, Sequence[NodeView]],
        jobs: Sequence[JobView],
        *,
        apart: Mapping[str, str] | None = None,
    ) -> Self:
        """Tolerance from the nodes of each pool and the jobs that want GPUs.

        ``apart``: pool -> mark of pools whose nodes are told from those of others.
        """
        relevant = {
            node.name: blocking(node.taints, (), pool.gpu_resource) if node.taints else ()
            for pool in pools
            for node in members[pool.name]
        }
        wanting = {_signature(view): view for view in jobs if view.spec is not None}
        wanting |= {_signature(view, avoid=False): view for view in jobs if view.avoided and view.spec}
        nodes = [node for pool in pools for node in members[pool.name]]
        excluded = {
            asked: frozenset(node.name for node in nodes if not asked.allow(node.name, node.labels))
            for asked in {requirements for _, requirements, _, _ in wanting}
        }
        rooms = _Rooms(pools, members)
        full = {need: rooms.too_small(need) for need in {need for _, _, need, _ in wanting}}
        avoided = frozenset[str]().union(*(names for _, _, _, names in wanting))
        marks = {node.name: mark for pool, mark in (apart or {}).items() for node in members[pool]}
        texts = _texts(relevant, [*excluded.values(), *filter(None, full.values())], avoided, marks)
        kinds = {texts[name]: taints for name, taints in relevant.items()}
        not_tolerated: dict[Signature, frozenset[str]] = {}
        if any(kinds.values()) or avoided or any(excluded.values()) or any(full.values()):
            for signature, view in wanting.items():
                assert view.spec is not None
                by_taint = {text for text, found in kinds.items() if blocking(found, view.spec.tolerations)}
                names = excluded[signature[1]] | full[signature[2]] | signature[3]
                not_tolerated[signature] = frozenset(by_taint.union(texts[n] for n in names if n in texts))
        sets = list(not_tolerated.values())
        by_no_job = sets[0].intersection(*sets[1:]) if sets else frozenset[str]()
        return cls(
            taints=texts,
            not_tolerated=not_tolerated,
            by_no_job=by_no_job,
            too_full={need: (names, rooms.words(need, names)) for need, names in full.items() if names},
        )

    def barred(self, view: JobView, *, avoid: bool = True) -> frozenset[str]:
        """Texts of nodes where the job must not start; ``avoid``: also where its pods did not run in time."""
        if not self.not_tolerated:
            return frozenset()
        return self.not_tolerated.get(_signature(view, avoid=avoid), frozenset())

    def without_room(self, view: JobView, pools: Sequence[str]) -> tuple[frozenset[str], str]:
        """(nodes that have the GPUs but no room for the job's pods, those of ``pools`` as text)."""
        assert view.spec is not None
        names, words = self.too_full.get(view.spec.pod_need, (frozenset(), {}))
        return names, "; ".join(words[pool] for pool in pools if pool in words)


class _Rooms:
    """Resources of the pools' nodes besides GPUs, less those of others' pods: gangs give way."""

    def __init__(self, pools: Sequence[NodePool], members: Mapping[str, Sequence[NodeView]]) -> None:
        self._nodes = [(pool, node) for pool in pools for node in members[pool.name]]
        self._gpus = np.array([node.gpus(pool.gpu_resource) for pool, node in self._nodes])
        self._gpu_resources = {pool.gpu_resource for pool in pools}
        self._columns: dict[str, np.ndarray] = {}

    def too_small(self, need: PodNeed) -> frozenset[str]:
        """Nodes without room for as many pods as a gang has there at most; of a large one, for all GPUs."""
        lacks = np.zeros(len(self._nodes), dtype=bool)
        pods = self._pods(need)
        for name, amount in need.asks:
            if name not in self._gpu_resources:
                lacks |= self._room(name) < amount * pods * (1 - 1e-9)
        return frozenset(self._nodes[index][1].name for index in np.flatnonzero(lacks))

    def words(self, need: PodNeed, names: frozenset[str]) -> dict[str, str]:
        """Pool -> its nodes among ``names``, with what the first one lacks."""
        found, counts = (
            dict[str, str](),
            Counter(pool.name for pool, node in self._nodes if node.name in names),
        )
        pods = self._pods(need)
        for index, (pool, node) in enumerate(self._nodes):
            if pool.name in found or node.name not in names:
                continue
            lacking = [
                f"{name} {amount:.4g} each, {max(0.0, has):.4g} left"
                for name, amount in need.asks
                if name not in self._gpu_resources
                and (has := self._room(name)[index]) < amount * pods[index] * (1 - 1e-9)
            ]
            count, ours = counts[pool.name], f"{pods[index]} of its pods" if pods[index] > 1 else "its pods"
            found[pool.name] = (
                f"{count} node{'' if count == 1 else 's'} of pool {pool.name} "
                f"{'has' if count == 1 else 'have'} no room for {ours}: on {node.name} {', '.join(lacking)}"
            )
        return found

    def _pods(self, need: PodNeed) -> np.ndarray:
        """Number of pods of the gang that each node may get."""
        pods: np.ndarray = np.clip(self._gpus // need.gpus_per_pod, 1, need.pods)
        return pods

    def _room(self, name: str) -> np.ndarray:
        """Room by node; none of an extended resource that a node does not name, no limit of another."""
        if name not in self._columns:
            absent = 0.0 if "/" in name else np.inf
            self._columns[name] = np.array(
                [node.room.get(name, absent) if node.room else np.inf for _, node in self._nodes]
            )
        return self._columns[name]


def _signature(view: JobView, *, avoid: bool = True) -> Signature:
    """Equal for jobs that may be started on the same nodes."""
    assert view.spec is not None
    return (*view.spec.node_signature, view.avoided if avoid else frozenset())


def _texts(
    relevant: Mapping[str, tuple[Taint, ...]],
    excluded: Sequence[frozenset[str]],
    avoided: frozenset[str],
    apart: Mapping[str, str],
) -> dict[str, str]:
    """Node -> its text; a node that some job avoids has its own."""
    marks: dict[str, list[str]] = {name: [apart[name]] if name in apart else [] for name in relevant}
    for number, names in enumerate(excluded):
        for name in names:
            marks[name].append(str(number))
    for name in avoided & marks.keys():
        marks[name].append(name)
    classes: dict[tuple[str, ...], int] = {}
    texts = {}
    for name, taints in relevant.items():
        text = ",".join(str(taint) for taint in taints)
        if marks[name]:
            text += f"{TOLD_APART}{classes.setdefault(tuple(marks[name]), len(classes))}"
        texts[name] = text
    return texts
