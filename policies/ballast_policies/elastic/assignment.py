"""The best configuration for each job: an exact choice within the GPUs of each type."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ballast_policies.configuration import Configuration
from ballast_policies.elastic.job import ElasticCluster

MOST_CELLS = 200_000
"""Numbers of GPUs of all types, multiplied, up to which the choice is exact."""
MOST_CELLS_KEPT = 20_000_000
"""That, times the jobs: 160 MB."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One job's configuration and what it is worth (above 0) to the objective."""

    configuration: Configuration
    worth: float


def best_assignment(jobs: Sequence[Sequence[Option]], cluster: ElasticCluster) -> list[Configuration | None]:
    """For each job one of its options or None, so that the sum of worths is largest.

    Exact by dynamic programming over the GPUs left of each type; sizes that do not find places side by
    side although there are GPUs enough are left out of a second choice, unless there are no others.  On
    clusters with more than MOST_CELLS combinations of GPUs left the jobs choose one after the other, in order
    of worth per part of the cluster: not exact.
    """
    cells = combinations(cluster)
    choose = _exact if cells <= MOST_CELLS and cells * len(jobs) <= MOST_CELLS_KEPT else _one_by_one
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
    """Those of the ``chosen`` that find places, the worthiest first: no job waits for want of a good size."""
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


def _one_by_one(jobs: Sequence[Sequence[Option]], cluster: ElasticCluster) -> list[Configuration | None]:
    left = dict(cluster.gpus)
    size = {gpu_type: max(1, gpus) for gpu_type, gpus in left.items()}
    ranked = sorted(
        (
            (option.worth / sum(n / size[t] for t, n in option.configuration.gpus.items()), i, option)
            for i, options in enumerate(jobs)
            for option in options
        ),
        key=lambda each: (-each[0], each[1]),
    )
    chosen: list[Option | None] = [None] * len(jobs)
    for _, i, option in ranked:
        now = chosen[i]
        had, wanted = {} if now is None else now.configuration.gpus, option.configuration.gpus
        if now is not None and (had.keys() != wanted.keys() or option.worth <= now.worth):
            continue
        if all(count - had.get(gpu_type, 0) <= left[gpu_type] for gpu_type, count in wanted.items()):
            for gpu_type, count in wanted.items():
                left[gpu_type] -= count - had.get(gpu_type, 0)
            chosen[i] = option
    return [None if option is None else option.configuration for option in chosen]
