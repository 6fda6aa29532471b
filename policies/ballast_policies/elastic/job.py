"""Elastic jobs, what they run on, and the best configuration for each within the GPUs of each type."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

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


MOST_CELLS = 200_000
"""Numbers of GPUs of all types, multiplied, up to which the choice is exact."""
MOST_CELLS_KEPT = 20_000_000
"""Numbers of GPUs of all types, multiplied, times the jobs: 160 MB."""
PRICE_STEPS = 60
"""Prices that are tried where the choice is not exact."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A job's configuration and what it is worth (above 0) to the objective."""

    configuration: Configuration
    worth: float


def best_assignment(jobs: Sequence[Sequence[Option]], cluster: ElasticCluster) -> list[Configuration | None]:
    """Option or None for each job, so that the sum of worths is largest.

    Exact by dynamic programming over the GPUs left of each type; sizes that do not find places side by
    side although there are GPUs enough are left out of a second choice, unless there are no others.  On
    clusters with more than MOST_CELLS combinations of GPUs left by prices of the GPU types: within 1 % of
    exact where jobs are many beside the types.
    """
    cells = combinations(cluster)
    choose = _exact if cells <= MOST_CELLS and cells * len(jobs) <= MOST_CELLS_KEPT else _by_prices
    chosen = choose(jobs, cluster)
    if cluster.fits(sizes_of(chosen)):
        return chosen
    again = choose(
        [[option for option in options if _always_fits(cluster, option.configuration)] for options in jobs],
        cluster,
    )
    return again if any(each is not None for each in again) else _side_by_side(jobs, chosen, cluster)


def combinations(cluster: ElasticCluster) -> int:
    """Numbers of GPUs of all types that may be left, multiplied."""
    return math.prod(gpus + 1 for gpus in cluster.gpus.values())


def _side_by_side(
    jobs: Sequence[Sequence[Option]], chosen: Sequence[Configuration | None], cluster: ElasticCluster
) -> list[Configuration | None]:
    """Options of ``chosen`` that find places, the worthiest first: no job waits for want of a good size."""
    worth = [
        max((option.worth for option in options if option.configuration is each), default=0.0)
        for options, each in zip(jobs, chosen, strict=True)
    ]
    placed: list[Configuration | None] = [None] * len(chosen)
    for i in sorted(range(len(chosen)), key=lambda i: -worth[i]):
        placed[i] = chosen[i]
        if not cluster.fits(sizes_of(placed)):
            placed[i] = None
    return placed


def sizes_of(chosen: Sequence[Configuration | None]) -> dict[str, list[int]]:
    """GPU type -> sizes of the jobs on it."""
    sizes: dict[str, list[int]] = {}
    for each in chosen:
        for gpu_type, gpus in {} if each is None else each.gpus.items():
            sizes.setdefault(gpu_type, []).append(gpus)
    return sizes


def _always_fits(cluster: ElasticCluster, configuration: Configuration) -> bool:
    return all(cluster.always_fits(gpu_type, gpus) for gpu_type, gpus in configuration.gpus.items())


def _exact(jobs: Sequence[Sequence[Option]], cluster: ElasticCluster) -> list[Configuration | None]:
    gpus = cluster.gpus
    axis = {gpu_type: i for i, gpu_type in enumerate(gpus)}
    shape = tuple(each + 1 for each in gpus.values())
    fitting = [[option for option in options if option.configuration.fits(gpus)] for options in jobs]
    # best[i][left]: the largest sum of the first i jobs' worths with that many GPUs of each type.
    best = [np.zeros(shape)]
    for options in fitting:
        last, following = best[-1], best[-1].copy()
        for option in options:
            before, after = _shifted(option.configuration, axis, shape)
            np.maximum(following[after], last[before] + option.worth, out=following[after])
        best.append(following)
    left = [each - 1 for each in shape]
    chosen: list[Configuration | None] = [None] * len(jobs)
    for i in range(len(jobs) - 1, -1, -1):
        here = best[i + 1][tuple(left)]
        if here == best[i][tuple(left)]:
            continue
        for option in fitting[i]:
            rest = list(left)
            for gpu_type, count in option.configuration.gpus.items():
                rest[axis[gpu_type]] -= count
            if min(rest) < 0:
                continue
            if best[i][tuple(rest)] + option.worth == here:
                chosen[i], left = option.configuration, rest
                break
    return chosen


def _shifted(
    configuration: Configuration, axis: dict[str, int], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The cells without, and with, the GPUs of a configuration."""
    before, after = [slice(None)] * len(shape), [slice(None)] * len(shape)
    for gpu_type, count in configuration.gpus.items():
        at = axis[gpu_type]
        before[at] = slice(0, shape[at] - count)
        after[at] = slice(count, shape[at])
    return tuple(before), tuple(after)


def _by_prices(jobs: Sequence[Sequence[Option]], cluster: ElasticCluster) -> list[Configuration | None]:
    gpus = cluster.gpus
    options = [(i, each) for i, row in enumerate(jobs) for each in row if each.configuration.fits(gpus)]
    chosen: list[int | None] = [None] * len(jobs)
    if options:
        owner = np.array([i for i, _ in options])
        worth = np.array([each.worth for _, each in options])
        needs = np.array([[each.configuration.gpus.get(kind, 0) for kind in gpus] for _, each in options])
        left = np.array(list(gpus.values()))
        rest = worth - needs @ _prices(owner, worth, needs, left)
        # First each job's best by the prices, then larger ones on what is left.
        for rank, larger in ((rest, False), (worth, True)):
            for at in np.argsort(-rank, kind="stable").tolist():
                had = chosen[owner[at]]
                if rank[at] <= 0 or (had is not None and not (larger and worth[at] > worth[had])):
                    continue
                free = left if had is None else left + needs[had]
                if (needs[at] <= free).all():
                    left, chosen[owner[at]] = free - needs[at], at
    return [None if at is None else options[at][1].configuration for at in chosen]


def _prices(owner: np.ndarray, worth: np.ndarray, needs: np.ndarray, gpus: np.ndarray) -> np.ndarray:
    """(k,) the worth of a GPU of each type that bounds the sum of worths best, of those tried.

    Prices rise where jobs, each at its best by them, want more GPUs than there are, and fall elsewhere; step
    lengths as those of Rprop (Riedmiller and Braun 1993).

    Of each option: ``owner`` (m,), ascending, ``worth`` (m,), ``needs`` (m, k); ``gpus`` (k,): of all.
    """
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(owner)))
    size = np.maximum(gpus, 1)
    prices: np.ndarray = worth.mean() / size
    least, best = math.inf, prices
    step, before = np.full(len(size), 0.3), np.zeros(len(size))
    for _ in range(PRICE_STEPS):
        rest = worth - needs @ prices
        top = np.maximum.reduceat(rest, starts)
        bound = float(prices @ gpus + np.maximum(top, 0.0).sum())
        if bound < least:
            least, best = bound, prices
        used = needs[(rest == top[group]) & (rest > 0)].sum(axis=0)
        pull = np.log(np.clip(used / size, 0.01, 4.0))
        step = np.clip(step * np.where(pull * before > 0, 1.4, 0.5), 0.005, 2.0)
        before, prices = pull, prices * np.exp(step * pull)
    return best
