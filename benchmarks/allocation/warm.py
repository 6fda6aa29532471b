"""Solving again after one arrival or departure: from the prices of the solution before, and from nothing.

    python benchmarks/allocation/warm.py --jobs 10000 --changes 20

Max-min fairness on ten GPU types (``instances``). Each change is solved both ways, in turn, on the
same instance. "solve" is the program alone, from its rows to shares and multipliers (what differs between the
two ways); "whole" is the policy from arrays to shares with the proof of the gap, of which making the rows
and proving the gap are the same work both ways. CPU seconds, so that a busy machine does not count.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import boxstep
from instances import cluster, without


class Stopwatch:
    """Adds up the CPU seconds spent in ``boxstep.solve``, by any caller."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inner: Callable[..., Any] = boxstep.solve
        boxstep.solve = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The solve, timed."""
        begin = time.process_time()
        found = self._inner(*args, **kwargs)
        self.seconds += time.process_time() - begin
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10000)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    n, changes = options.jobs, options.changes
    everyone = cluster(n + changes, seed=options.seed)
    newcomers = np.arange(n, n + changes)
    before = without(everyone, newcomers)
    stopwatch = Stopwatch()
    start = solve("max-min-fairness", before).start
    leavers = np.random.default_rng(options.seed).choice(n, changes, replace=False)
    print(f"{n} jobs, 10 GPU types, {changes} changes each; CPU milliseconds\n")
    print("| change | part | cold median (worst) | warm median (worst) | times faster | largest gap |")
    print("|---|---|---|---|---|---|")
    for change in ("arrival", "departure"):
        taken: dict[tuple[str, str], list[float]] = {}
        gap = 0.0
        for i in range(changes):
            gone = [*newcomers[:i], *newcomers[i + 1 :]] if change == "arrival" else [*newcomers, leavers[i]]
            after = without(everyone, np.array(gone, dtype=int))
            for way, given in (("cold", None), ("warm", start)):
                stopwatch.seconds, begin = 0.0, time.process_time()
                answer = solve("max-min-fairness", after, start=given)
                taken.setdefault((way, "whole"), []).append(time.process_time() - begin)
                taken.setdefault((way, "solve"), []).append(stopwatch.seconds)
                gap = max(gap, answer.gap or 0.0)
        for part in ("solve", "whole"):
            cold, warm = taken["cold", part], taken["warm", part]
            print(
                f"| {change} | {part} | {1e3 * statistics.median(cold):.1f} ({1e3 * max(cold):.1f}) "
                f"| {1e3 * statistics.median(warm):.1f} ({1e3 * max(warm):.1f}) "
                f"| {statistics.median(cold) / statistics.median(warm):.1f} | {gap:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
