"""AlloX: least average completion time, by matching jobs to places in queues (Le et al., EuroSys 2020).

A job that is the i-th from last in a GPU's queue delays i jobs (itself and those after it) by its length, so

    minimise  sum_{m, j, i}  i p_mj y_mji   over assignments y of jobs to places;  p_mj = num_steps_m / T_mj

is the sum of the times in the queues: an assignment problem, with capacity_j places (j, i) for each i.
Only the first max(number of GPUs, 0.3 n) jobs in order of arrival take part, so that none starves
(AlloX's alpha). The jobs at the heads of the queues get their GPUs for all of the time; the others wait.

A gang of g GPUs, which AlloX does not have, counts as g p_mj of GPU time in the matching, and starts when
g GPUs of its type are free in the order of the queues; with g = 1 this is AlloX, and exact. Decisions
depend on nothing but the problem: that running jobs keep their GPUs is left to the rounds.
Objective: mean completion time (``elapsed`` included) of the jobs that take part, as planned, in seconds.
"""

import heapq

import numpy as np

from ballast_policies.allocation.answer import Answer
from ballast_policies.allocation.instance import Instance

ALPHA = 0.3
SOLVER = "assignment"


def solve(problem: Instance) -> Answer:
    """Whole GPUs to the jobs at the heads of the queues."""
    seconds, part = _lengths(problem), _taking_part(problem)
    x = np.zeros(len(problem.columns))
    if not len(part):
        return Answer(x=x, solver=SOLVER, gap=0.0, value=lambda real: 0.0)
    kind, place = _match(problem, seconds, part)
    queues = []
    at = {
        (int(m), int(j)): c
        for c, (m, j) in enumerate(zip(problem.columns.first, problem.columns.kind, strict=True))
    }
    for j in range(len(problem.capacity)):
        queue = np.flatnonzero(kind == j)
        # Heads of the queues first: furthest from last, then shortest, then earliest.
        queue = queue[np.lexsort((queue, seconds[part[queue], j], -place[queue]))]
        queues.append(part[queue])
        starts = _start_times(problem.gpus[part[queue]], seconds[part[queue], j], problem.capacity[j])
        for i in queue[starts == 0]:
            x[at[int(part[i]), j]] = 1.0
    exact = bool((problem.gpus[part] == 1).all())
    return Answer(
        x=x,
        solver=SOLVER,
        status="optimal" if exact else "heuristic",
        gap=0.0 if exact else None,
        value=lambda real: _mean_completion_time(real, queues),
    )


def _mean_completion_time(problem: Instance, queues: list[np.ndarray]) -> float:
    """Seconds from arrival to end, on average, if each type serves its queue of jobs (rows) in order."""
    seconds, ends = _lengths(problem), []
    for j, queue in enumerate(queues):
        starts = _start_times(problem.gpus[queue], seconds[queue, j], problem.capacity[j])
        ends.append(problem.elapsed[queue] + starts + seconds[queue, j])
    return float(np.concatenate(ends).mean())


def objective(problem: Instance, x: np.ndarray) -> float:
    """Not a function of the shares alone: the answer brings its own value."""
    del problem, x
    return float("nan")


def _lengths(problem: Instance) -> np.ndarray:
    """(n, k) seconds to the end on each type; infinite where the job cannot run."""
    steps = np.broadcast_to(problem.steps()[:, None], problem.T.shape)
    return np.divide(steps, problem.T, out=np.full(problem.T.shape, np.inf), where=problem.T > 0)


def _taking_part(problem: Instance) -> np.ndarray:
    """Rows of the jobs that are matched, in order of arrival."""
    order = problem.arrival_order()
    order = order[(problem.runnable & (problem.steps() > 0))[order]]
    return order[: max(int(problem.capacity.sum()), int(ALPHA * len(order)))]


def _match(problem: Instance, seconds: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Type and place from last (1 = last) of each job in ``part``."""
    from scipy.optimize import linear_sum_assignment

    kinds, places = [], []
    for j, gpus in enumerate(problem.capacity.astype(int)):
        if gpus:
            # No queue need be longer than all jobs spread evenly over its type.
            count = -(-len(part) // gpus)
            kinds.append(np.full(count * gpus, j))
            places.append(np.repeat(np.arange(1, count + 1), gpus))
    kind, place = np.concatenate(kinds), np.concatenate(places)
    work = (problem.gpus[:, None] * seconds)[part]
    # A place that a job cannot take costs more than all that it can.
    finite = np.isfinite(work)
    never = 1.0 + 2.0 * len(part) * place.max() * work[finite].max()
    cost = np.where(finite, work, never)[:, kind] * place
    _, chosen = linear_sum_assignment(cost)
    return kind[chosen], place[chosen]


def _start_times(gpus: np.ndarray, seconds: np.ndarray, capacity: float) -> np.ndarray:
    """Start of each job of a queue on ``capacity`` GPUs: in order, but a smaller gang may fill a gap now."""
    starts = np.full(len(gpus), np.inf)
    running: list[tuple[float, int]] = []
    waiting, free, now = list(range(len(gpus))), float(capacity), 0.0
    while waiting:
        still = []
        for i in waiting:
            if gpus[i] <= free:
                starts[i], free = now, free - gpus[i]
                heapq.heappush(running, (now + seconds[i], i))
            else:
                still.append(i)
        waiting = still
        if waiting:
            now, i = heapq.heappop(running)
            free += gpus[i]
            while running and running[0][0] <= now:
                free += gpus[heapq.heappop(running)[1]]
    return starts
