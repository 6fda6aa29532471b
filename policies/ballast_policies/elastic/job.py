"""Elastic jobs and what they run on, as values."""

import dataclasses
from collections.abc import Mapping

from ballast_policies.allocation.problem import Configuration
from ballast_policies.contract.errors import ContractError, Problem
from ballast_policies.contract.limits import MOST_SECONDS

LEAST_SECONDS = 1e-6
"""Shortest job: beside less than this no restart could be weighed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """A job with a choice.

    Attributes:
        name: unique.
        arrival: s.
        work: units, of the user's choice.
        restart_seconds: from a change of configuration, or a start, to the next step.
        configurations: at least one.
        resize_seconds: pause of a change to other numbers of the same GPU types; None: it is a restart.
        weight: of its completion time, above 0.
        spread: (GPU type, GPUs) -> nodes -> units/s, where the gang is on more nodes than would hold it.
    """

    name: str
    arrival: float
    work: float
    restart_seconds: float
    configurations: tuple[Configuration, ...]
    resize_seconds: float | None = None
    weight: float = 1.0
    spread: Mapping[tuple[str, int], Mapping[int, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if not self.configurations:
            problems.append(Problem("configurations", "there is none. To fix: give at least one"))
        problems += [
            Problem(path, f"{seconds:g} s is not between 0 and {MOST_SECONDS:g} s")
            for path, seconds in (("arrival", self.arrival), ("restartSeconds", self.restart_seconds))
            if not 0 <= seconds <= MOST_SECONDS
        ]
        problems += [
            Problem("configurations", f"{each.name}: its speed {each.throughput:g} is not above 0")
            for each in self.configurations
            if not each.throughput > 0
        ]
        if problems:
            raise ContractError(problems)
        seconds = self.work / max(each.throughput for each in self.configurations)
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            reason = f"{self.work:g} takes {seconds:g} s at the best speed"
            raise ContractError(
                Problem("work", f"{reason}. To fix: between {LEAST_SECONDS:g} and {MOST_SECONDS:g} s")
            )

    def change_seconds(self, before: Configuration | None, after: Configuration) -> float:
        """Seconds from the change, or start, to the next step."""
        live = before is not None and before.gpus.keys() == after.gpus.keys()
        return self.resize_seconds if live and self.resize_seconds is not None else self.restart_seconds

    def fastest_seconds(self) -> float:
        """Completion time alone on the cluster, the first start included."""
        return self.restart_seconds + self.work / max(each.throughput for each in self.configurations)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job in the system.

    Attributes:
        remaining: work left, above 0.
        current: what it runs on; None: it waits.
        restart_left: s until its next step, where it runs.
        restarts: so far; the first start is none.
        held_to: it keeps its GPUs until the next change, in one of these configurations; empty: it need not.
    """

    job: ElasticJob
    remaining: float
    current: Configuration | None = None
    restart_left: float = 0.0
    restarts: int = 0
    held_to: tuple[Configuration, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticCluster:
    """GPU types with their nodes.

    Attributes:
        nodes: GPU type -> number of nodes.
        gpus_per_node: GPU type -> GPUs of each node.
    """

    nodes: Mapping[str, int]
    gpus_per_node: Mapping[str, int]

    @property
    def gpus(self) -> dict[str, int]:
        """GPU type -> GPUs."""
        return {gpu_type: nodes * self.gpus_per_node[gpu_type] for gpu_type, nodes in self.nodes.items()}

    def fits(self, counts: Mapping[str, list[int]]) -> bool:
        """True if jobs of these sizes (GPU type -> GPUs each) find consolidated places side by side.

        A job takes whole nodes and has its remainder on one more; remainders are packed largest first,
        each where the least room is left (best fit decreasing), which may miss a packing that exists.
        """
        return all(self._fits(gpu_type, sizes) for gpu_type, sizes in counts.items())

    def always_fits(self, gpu_type: str, gpus: int) -> bool:
        """True if sizes like this one find places side by side wherever there are enough GPUs.

        Whole nodes, and powers of two that divide a node.
        """
        size = self.gpus_per_node[gpu_type]
        return gpus % size == 0 or (gpus < size and size % gpus == 0 and gpus & (gpus - 1) == 0)

    def _fits(self, gpu_type: str, sizes: list[int]) -> bool:
        size = self.gpus_per_node[gpu_type]
        whole = self.nodes[gpu_type] - sum(each // size for each in sizes)
        room: list[int] = []
        for part in sorted((each % size for each in sizes if each % size), reverse=True):
            places = [i for i, left in enumerate(room) if left >= part]
            if places:
                room[min(places, key=room.__getitem__)] -= part
            else:
                whole -= 1
                room.append(size - part)
        return whole >= 0
