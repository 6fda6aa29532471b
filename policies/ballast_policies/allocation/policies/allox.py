"""AlloX: least average completion time, by matching jobs to places in queues (Le et al., EuroSys 2020).

A job that is the i-th from last in a GPU's queue delays i jobs (itself and those after it) by its length, so

    minimise  sum_{m, j, i}  i p_mj y_mji   over assignments y of jobs to places;  p_mj = num_steps_m / T_mj

is the sum of the times in the queues: an assignment problem, with capacity_j places (j, i) for each i. All
jobs that can run take part, at all places (``solvers.queues``; the gap is proven there). The jobs at the
heads of the queues get their GPUs for all of the time; the others wait. AlloX's alpha, which matches only
those that have waited longest so that long jobs do not starve, is not applied: it would increase the average.

A gang of g GPUs, which AlloX does not have, counts as g p_mj of GPU time in the matching, and starts when
g GPUs of its type are free in the order of the queues: a heuristic, without a bound. Decisions
depend on the problem alone; the rounds see to it that running jobs keep their GPUs.
Objective: mean completion time (``elapsed`` included), as planned, in seconds.
"""

import heapq
from collections import deque

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer
from ballast_policies.allocation.solvers.queues import match

SOLVER = "assignment"


def solve(instance: Instance) -> Answer:
    """Whole GPUs to the jobs at the heads of the queues."""
    seconds = _lengths(instance)
    part = np.flatnonzero(instance.runnable & (instance.steps() > 0))
    x = np.zeros(len(instance.columns))
    if not len(part):
        return Answer(x=x, solver=SOLVER, gap=0.0, value=lambda real: 0.0)
    gpus = instance.gpus[part]
    found = match((gpus[:, None] * seconds[part]), np.floor(instance.capacity))
    column = np.full(instance.T.shape, -1)
    alone = np.flatnonzero(instance.columns.second < 0)
    column[instance.columns.first[alone], instance.columns.kind[alone]] = alone
    queues = []
    for j in range(len(instance.capacity)):
        queue = np.flatnonzero(found.kind == j)
        # Heads of the queues first: furthest from last, then shortest, then earliest.
        queue = part[queue[np.lexsort((queue, seconds[part[queue], j], -found.place[queue]))]]
        queues.append(queue)
        starts = _start_times(instance.gpus[queue], seconds[queue, j], instance.capacity[j])
        x[column[queue[starts == 0], j]] = 1.0
    single = bool((gpus == 1).all())
    waited = float(instance.elapsed[part].sum())
    return Answer(
        x=x,
        solver=SOLVER,
        status="optimal" if single else "heuristic",
        gap=(found.total - found.bound) / max(found.bound + waited, 1e-12) if single else None,
        value=lambda real: _mean_completion_time(real, queues),
    )


def _mean_completion_time(instance: Instance, queues: list[np.ndarray]) -> float:
    """Seconds from arrival to end, on average, if each type serves its queue of jobs (rows) in order."""
    seconds, ends = _lengths(instance), []
    for j, queue in enumerate(queues):
        starts = _start_times(instance.gpus[queue], seconds[queue, j], instance.capacity[j])
        ends.append(instance.elapsed[queue] + starts + seconds[queue, j])
    return float(np.concatenate(ends).mean())


def objective(instance: Instance, x: np.ndarray) -> float:
    """Not a function of the shares alone: the answer carries its own value."""
    del instance, x
    return float("nan")


def _lengths(instance: Instance) -> np.ndarray:
    """(n, k) seconds to the end on each type; infinite where the job cannot run."""
    steps = np.broadcast_to(instance.steps()[:, None], instance.T.shape)
    never = np.full(instance.T.shape, np.inf)
    seconds: np.ndarray = np.divide(steps, instance.T, out=never, where=instance.T > 0)
    return seconds


def _start_times(gpus: np.ndarray, seconds: np.ndarray, capacity: float) -> np.ndarray:
    """Start of each job of a queue on ``capacity`` GPUs: in order, but a smaller gang may fill a gap now."""
    starts = np.full(len(gpus), np.inf)
    sizes = gpus.tolist()
    waiting: dict[float, deque[int]] = {}
    for i, size in enumerate(sizes):
        waiting.setdefault(size, deque()).append(i)
    running: list[tuple[float, int]] = []
    free, now = float(capacity), 0.0
    while waiting:
        # Of all gangs that fit, the first in the queue; then again, as long as one fits.
        fitting = [(queue[0], size) for size, queue in waiting.items() if size <= free]
        if fitting:
            i, size = min(fitting)
            waiting[size].popleft()
            if not waiting[size]:
                del waiting[size]
            starts[i], free = now, free - size
            heapq.heappush(running, (now + float(seconds[i]), i))
            continue
        now, i = heapq.heappop(running)
        free += sizes[i]
        while running and running[0][0] <= now:
            free += sizes[heapq.heappop(running)[1]]
    return starts
