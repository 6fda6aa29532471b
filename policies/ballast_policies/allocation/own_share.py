"""An elastic job's use of its own part of every GPU type, in its best configurations.

    maximise    sum_c throughput_c x_c
    subject to  sum_c gpus_cj x_c <= capacity_j / n_m   for every type j,   sum_c x_c <= 1,   x >= 0

one small linear program a job. All are solved together, by the simplex method on arrays: a step is a pivot in
every program that is not at its optimum yet.
"""

import numpy as np

from ballast_policies.allocation.columns import Columns

OPTIMAL = 1e-12
"""Reduced worth, as a part of the job's fastest speed, up to which a column is not worth entering."""
SMALLEST_PIVOT = 1e-11
MAX_PIVOTS = 200
"""Pivots after which a program goes to HiGHS; they take about as many as there are types."""
MOST_ENTRIES = 4_000_000
"""Entries of the tables of the programs that are solved together."""


def own_share(columns: Columns, capacity: np.ndarray, jobs: np.ndarray) -> np.ndarray:
    """(columns,) shares of time of each job m on 1/``jobs[m]`` of the ``capacity`` (k,): its best use of it.

    Args:
        columns: jobs alone, those of one job together and jobs in order of their rows.
        capacity: (k,) GPUs of each type.
        jobs: (n,) among how many jobs like each the GPUs are divided.
    """
    x = np.zeros(len(columns))
    if not len(columns):
        return x
    k = len(capacity)
    begin = np.flatnonzero(np.append(True, columns.first[1:] != columns.first[:-1]))
    counts = np.diff(np.append(begin, len(columns)))
    part = np.where(capacity > 0, capacity, 1.0) / jobs[columns.first[begin], None]
    # Programs of about the same width together, so that padding costs little.
    order = np.argsort(counts, kind="stable")
    done = 0
    while done < len(order):
        many = np.searchsorted(
            np.arange(1, len(order) - done + 1) * counts[order[done:]] * (k + 1), MOST_ENTRIES, side="right"
        )
        some = order[done : done + max(1, int(many))]
        done += len(some)
        width = int(counts[some].max())
        row = np.repeat(np.arange(len(some)), counts[some])
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts[some]) - counts[some], counts[some])
        at = begin[some][row] + place
        here = columns.take(at)
        table = np.zeros((len(some), k + 1, width))
        column, kind, gpus = here.entries()
        table[row[column], kind, place[column]] = gpus / part[some][row[column], kind]
        table[row, k, place] = 1.0
        worth = np.zeros((len(some), width))
        worth[row, place] = here.rate_first
        worth /= worth.max(axis=1, keepdims=True)
        x[at] = best_use(worth, table)[0][row, place]
    return x


def best_use(worth: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solutions of n programs: maximise worth . x subject to table x <= 1, x >= 0.

    Args:
        worth: (n, c), 1 at most.
        table: (n, r, c), at least 0; a column of zeros is none.

    Returns:
        (x, shape (n, c); multipliers of the rows, shape (n, r)).
    """
    n, rows, width = table.shape
    x, multipliers = np.zeros((n, width)), np.zeros((n, rows))
    # Basic variables (from ``width`` on: the slack of a row), the inverse of their columns, their values.
    basis = np.tile(width + np.arange(rows), (n, 1))
    inverse = np.tile(np.eye(rows), (n, 1, 1))
    active = np.arange(n)
    for _ in range(MAX_PIVOTS):
        every = np.arange(len(active))
        mine, inv = basis[active], inverse[active]
        earns = np.where(
            mine < width, np.take_along_axis(worth[active], np.minimum(mine, width - 1), axis=1), 0.0
        )
        prices = np.einsum("ni,nij->nj", earns, inv)
        gain = np.concatenate(
            [worth[active] - np.einsum("nj,njc->nc", prices, table[active]), -prices], axis=1
        )
        entering = gain.argmax(axis=1)
        open_ = gain[every, entering] > OPTIMAL
        multipliers[active] = prices
        if not open_.any():
            active = active[:0]
            break
        active, entering, mine, inv = active[open_], entering[open_], mine[open_], inv[open_]
        every = np.arange(len(active))
        slack = entering >= width
        into = table[active, :, np.minimum(entering, width - 1)]
        into[slack] = np.eye(rows)[entering[slack] - width]
        direction = np.einsum("nij,nj->ni", inv, into)
        values = inv.sum(axis=2)
        rising = direction > SMALLEST_PIVOT
        ratio = np.divide(np.maximum(values, 0.0), direction, out=np.full_like(values, np.inf), where=rising)
        leaving = ratio.argmin(axis=1)
        pivot = direction[every, leaving]
        row = inv[every, leaving] / pivot[:, None]
        inv = inv - direction[:, :, None] * row[:, None, :]
        inv[every, leaving] = row
        mine[every, leaving] = entering
        basis[active], inverse[active] = mine, inv
    values = np.maximum(inverse.sum(axis=2), 0.0)
    here, which = np.nonzero(basis < width)
    x[here, basis[here, which]] = values[here, which]
    for m in active.tolist():
        x[m], multipliers[m] = _by_highs(worth[m], table[m])
    return x, np.maximum(multipliers, 0.0)


def _by_highs(worth: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The solution (c,) and multipliers (r,) of one program that did not end."""
    from scipy.optimize import linprog

    found = linprog(-worth, A_ub=table, b_ub=np.ones(len(table)), bounds=(0, None), method="highs")
    return found.x, -found.ineqlin.marginals
