"""Max-min fairness over many distinct jobs: this project's solver beside others, same instances, one run.

    python benchmarks/allocation/max_min.py --jobs 10000 100000 --limit 120

Ten GPU types, gangs, weights (``instances``). Solvers of the same LP: HiGHS's simplex, interior
point and PDLP, Clarabel; and POP (SOSP 2021): jobs dealt at random into k clusters with a k-th of the GPUs
each, every one solved by HiGHS's simplex. Everybody's shares are scaled to keep all limits exactly; the gap
is the distance of the level so reached to the bound that this project's prices prove by weak duality.
Seconds are of the clock, and of the CPU in brackets: what else the machine does shows in the first only.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import clarabel
import highspy
import numpy as np
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies import max_min_fairness
from ballast_policies.allocation.registry import solve
from instances import cluster
from scipy import sparse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Maximise the last variable subject to ``matrix`` v <= ``right``, x >= 0; scaled rows."""

    matrix: sparse.csc_matrix
    right: np.ndarray


def program(instance: Instance) -> Program:
    """Rows: level t - rate . x <= 0, time, GPUs."""
    columns, n, k = instance.columns, len(instance.gpus), len(instance.capacity)
    c = len(columns)
    here = np.arange(c)
    level = (instance.level_scale / instance.weights)[columns.first] * columns.rate_first
    scale = np.ones(n)
    np.maximum.at(scale, columns.first, level)
    matrix = sparse.coo_matrix(
        (
            np.concatenate(
                [
                    -level / scale[columns.first],
                    np.ones(c),
                    columns.gpus / instance.capacity[columns.kind],
                    1.0 / scale,
                ]
            ),
            (
                np.concatenate([columns.first, n + columns.first, 2 * n + columns.kind, np.arange(n)]),
                np.concatenate([here, here, here, np.full(n, c)]),
            ),
        ),
        shape=(2 * n + k, c + 1),
    )
    return Program(matrix=matrix.tocsc(), right=np.concatenate([np.zeros(n), np.ones(n + k)]))


def by_highs(instance: Instance, method: str, limit: float) -> np.ndarray | None:
    """Shares by HiGHS, or None where the limit came first."""
    posed = program(instance)
    rows, width = posed.matrix.shape
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_, lp.sense_ = width, rows, highspy.ObjSense.kMaximize
    lp.col_cost_ = np.append(np.zeros(width - 1), 1.0)
    lp.col_lower_, lp.col_upper_ = np.zeros(width), np.full(width, highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = np.full(rows, -highspy.kHighsInf), posed.right
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_ = posed.matrix.indptr, posed.matrix.indices
    lp.a_matrix_.value_ = posed.matrix.data
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("solver", method)
    highs.setOptionValue("time_limit", limit)
    if method == "ipm":
        highs.setOptionValue("run_crossover", "off")
    if method == "pdlp":
        highs.setOptionValue("pdlp_optimality_tolerance", 1e-6)
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return np.array(highs.getSolution().col_value)[:-1]


def by_clarabel(instance: Instance, limit: float) -> np.ndarray | None:
    """Shares by Clarabel, or None where the limit came first."""
    posed = program(instance)
    width = posed.matrix.shape[1]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.time_limit = limit
    below = sparse.eye(width, format="csc") * -1.0
    found = clarabel.DefaultSolver(
        sparse.csc_matrix((width, width)),
        np.append(np.zeros(width - 1), -1.0),
        sparse.vstack([posed.matrix, below]).tocsc(),
        np.concatenate([posed.right, np.zeros(width)]),
        [clarabel.NonnegativeConeT(posed.matrix.shape[0] + width)],
        settings,
    ).solve()
    return np.array(found.x)[:-1] if str(found.status) in ("Solved", "AlmostSolved") else None


def by_pop(instance: Instance, parts: int, limit: float) -> np.ndarray | None:
    """Shares by POP, or None where the limit came first."""
    end, x = time.perf_counter() + limit, np.zeros(len(instance.columns))
    dealt = np.random.default_rng(0).permutation(len(instance.gpus)) % parts
    for part in range(parts):
        mine = np.flatnonzero(dealt == part)
        place = np.full(len(instance.gpus), -1)
        place[mine] = np.arange(len(mine))
        inside = place[instance.columns.first] >= 0
        columns = instance.columns.take(inside)
        some = dataclasses.replace(
            instance,
            capacity=instance.capacity / parts,
            gpus=instance.gpus[mine],
            weights=instance.weights[mine],
            T=instance.T[mine],
            equal=instance.equal[mine],
            level_at_equal=instance.level_at_equal[mine],
            columns=dataclasses.replace(columns, first=place[columns.first]),
        )
        found = by_highs(some, "simplex", max(0.1, end - time.perf_counter()))
        if found is None:
            return None
        x[inside] = found
    return x


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--types", type=int, default=10)
    parser.add_argument("--contention", type=float, default=10.0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each solve")
    options = parser.parse_args()
    limit = options.limit
    others: dict[str, Callable[[Instance], np.ndarray | None]] = {
        "HiGHS simplex": lambda p: by_highs(p, "simplex", limit),
        "HiGHS interior point": lambda p: by_highs(p, "ipm", limit),
        "HiGHS PDLP, 1e-6": lambda p: by_highs(p, "pdlp", limit),
        "Clarabel": lambda p: by_clarabel(p, limit),
        "POP, 4 parts": lambda p: by_pop(p, 4, limit),
        "POP, 8 parts": lambda p: by_pop(p, 8, limit),
    }
    solve("max-min-fairness", cluster(2000))  # imports and first calls are not the solve
    for jobs in options.jobs:
        problem = cluster(jobs, types=options.types, contention=options.contention)
        clock, cpu = time.perf_counter(), time.process_time()
        answer = solve("max-min-fairness", problem)
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        assert answer.bound is not None
        assert answer.objective is not None
        print(f"\n{jobs} jobs, {options.types} GPU types: level {answer.objective:.9f}, ", end="")
        print(f"proven bound {answer.bound:.9f}, gap {answer.gap:.1e}\n")
        print("| solver | seconds (CPU) | times ours | level | gap to the bound |\n|---|---|---|---|---|")
        print(
            f"| this project | {clock:.2f} ({cpu:.2f}) | 1 | {answer.objective:.9f} | {answer.gap:.1e} |",
            flush=True,
        )
        for name, other in others.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            x = other(problem)
            took, took_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
            if x is None:
                print(f"| {name} | not within {limit:g} | > {limit / clock:.0f} | | |", flush=True)
                continue
            level = max_min_fairness.objective(problem, problem.feasible(x))
            gap = (answer.bound - level) / answer.bound
            print(
                f"| {name} | {took:.2f} ({took_cpu:.2f}) | {took / clock:.0f} | {level:.9f} | {gap:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
