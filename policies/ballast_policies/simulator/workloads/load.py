"""How much of a cluster the jobs need that arrive, before any is simulated.

Let a GPU second of type k cost p_k, and all GPUs together 1 a second.  No schedule serves a job for less
than it costs on its cheapest type, so what the arriving jobs cost there a second, sum over jobs of
min_k p_k x (GPU seconds on k), is at most the part of the cluster that they need, whatever the prices (weak
duality).  Equal prices give demand on the fastest types over all GPUs; the best prices make the bound
exact, where GPU time can be divided at will.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from ballast_policies.simulator.workloads.workload import TraceJob
from ballast_policies.throughput.table import JobType, ThroughputTable

_ITERATIONS = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arriving jobs need on average.

    Attributes:
        fastest_gpus: GPUs that would be busy, if each job always ran on its fastest type.
        least: fraction of the cluster that they keep busy at least, without pairs of jobs on one GPU; above
            1 the queue grows without limit.
    """

    fastest_gpus: float
    least: float


def load_of(
    jobs: Iterable[TraceJob], gpus: Mapping[str, int], table: ThroughputTable, *, jobs_per_hour: float
) -> Load:
    """The load of jobs like these on GPU types with ``gpus`` GPUs; jobs that fit nowhere do not count.

    Raises:
        ThroughputError: the table does not know a job's type or a GPU type.
    """
    steps: dict[JobType, float] = {}
    count = 0
    for job in jobs:
        steps[job.type] = steps.get(job.type, 0.0) + job.steps
        count += 1
    types = [name for name, number in gpus.items() if number > 0]
    capacity = np.array([gpus[name] for name in types], dtype=float)
    needed = np.full((len(steps), len(types)), np.inf)
    for row, (job_type, total) in enumerate(steps.items()):
        for column, name in enumerate(types):
            rate = table.alone(job_type, name)
            if rate > 0 and job_type.gpus <= capacity[column]:
                needed[row, column] = job_type.gpus * total / rate
    needed = needed[np.isfinite(needed).any(axis=1)]
    if not len(needed):
        return Load(fastest_gpus=0.0, least=0.0)
    # GPU seconds of the mean job, times jobs a second.
    needed *= jobs_per_hour / 3600.0 / count
    return Load(fastest_gpus=float(needed.min(axis=1).sum()), least=_best_bound(needed / capacity, capacity))


def _best_bound(part: np.ndarray, capacity: np.ndarray) -> float:
    """Largest bound found over prices, by multiplicative steps upwards.

    Args:
        part: (M, K) part of all GPUs of type k that jobs of kind m keep busy there.
        capacity: (K,) GPUs.
    """
    rows = np.arange(len(part))
    price = capacity / capacity.sum()
    best = 0.0
    for iteration in range(_ITERATIONS):
        cheapest = (part * price).argmin(axis=1)
        busy = np.bincount(cheapest, weights=part[rows, cheapest], minlength=len(capacity))
        best = max(best, float(price @ busy))
        price = price * np.exp(busy / busy.max() / np.sqrt(iteration + 1))
        price /= price.sum()
    return best
