"""Policies over elastic jobs in families: seconds, proven gap, and the ratio to one plain linear program.

    python benchmarks/allocation/elastic.py --jobs 1000 10000 --plain 1000
    python benchmarks/allocation/elastic.py --jobs 1000 --family mixed like --policy max-min-fairness

1,000 jobs with 50 configurations each over 6 GPU types are 50,000 columns. Each solve runs in a process of
its own that is ended at ``--limit`` seconds. Seconds are CPU seconds, then of the clock in brackets; building
the instance from its arrays, own shares included, is counted. ``plain`` is the same policy with every
program given to HiGHS as it is.
"""

import argparse
import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from ballast_policies.allocation.instance import Instance, Options, from_arrays
from ballast_policies.allocation.registry import POLICIES, solve
from ballast_policies.allocation.solvers import methods

EXACT = ("max-min-fairness", "makespan", "finish-time-fairness", "max-throughput", "fifo", "min-cost")
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticFamily:
    """Distribution of elastic instances of one kind.

    Attributes:
        name: what is special about it.
        demand: jobs x 8 GPUs, per GPU of the cluster.
        types: GPU types.
        configurations: of each job.
        mixed: part of the configurations that take two or three types.
        models: jobs are copies of this many; None: no two are alike.
        power: speed grows with size to a power between these.
        noise: sigma of the logarithm of each speed.
        tails: sizes of jobs and weights have heavy tails.
        gangs: part of the jobs that are gangs of one size.
    """

    name: str
    demand: float = 2.0
    types: int = 6
    configurations: int = 50
    mixed: float = 0.3
    models: int | None = None
    power: tuple[float, float] = (0.4, 0.95)
    noise: float = 0.05
    tails: bool = False
    gangs: float = 0.0

    def drawn(self, jobs: int, seed: int = 0) -> Callable[[], Instance]:
        """Builder of an instance from the arrays that are drawn here."""
        draw = np.random.default_rng(seed)
        k, n = self.types, jobs if self.models is None else min(jobs, self.models)
        c = self.configurations
        of_type = np.sort(draw.uniform(1.0, 8.0, k))
        # Types differ for every job, a power of their speed.
        liking = of_type ** draw.uniform(0.3, 1.2, (n, 1)) * np.exp(0.3 * draw.standard_normal((n, k)))
        job = np.repeat(np.arange(n), c)
        gpus, row = np.zeros((n * c, k)), np.arange(n * c)
        parts = np.where(draw.random(n * c) < self.mixed, draw.integers(2, 4, n * c), 1)
        for part in range(3):
            here = parts > part
            gpus[row[here], draw.integers(0, k, int(here.sum()))] = draw.choice(SIZES, int(here.sum()))
        size = np.exp((2.5 if self.tails else 1.0) * draw.standard_normal(n))
        power = draw.uniform(*self.power, n)
        speed = size[job] * (gpus * liking[job]).sum(axis=1) ** power[job]
        speed *= np.exp(self.noise * draw.standard_normal(n * c))
        weights = draw.choice([1.0, 5.0], n, p=[0.8, 0.2])
        hours = 10 ** draw.uniform(-0.5, 1.5, n)
        if self.tails:
            weights, hours = 1.0 + draw.pareto(1.1, n), hours * (1.0 + draw.pareto(0.9, n))
        model = np.arange(n) if self.models is None else draw.integers(0, n, jobs)
        elastic = draw.random(jobs) >= self.gangs
        T = np.where(elastic[:, None], 0.0, (size[:, None] * liking)[model])
        chosen = np.flatnonzero(elastic)
        at = (model[chosen][:, None] * c + np.arange(c)).ravel()
        options = Options(
            job=np.repeat(chosen, c),
            place=np.tile(np.arange(c), len(chosen)),
            gpus=gpus[at],
            throughput=speed[at],
            names=[[str(place) for place in range(c)] if each else () for each in elastic.tolist()],
        )
        top = np.maximum.reduceat(speed, np.arange(0, n * c, c))[model]
        waited = draw.uniform(0, 4e4, jobs)
        capacity = np.maximum(64.0, np.floor(draw.dirichlet(np.full(k, 5.0)) * 8 * jobs / self.demand))
        steps = np.where(elastic, top, T.max(axis=1)) * 3600.0 * hours[model]
        steps *= 1.0 if self.models else draw.uniform(0.5, 1.5, jobs)
        waited *= 0.0 if self.models else 1.0
        deadlines = np.where(draw.random(jobs) < 0.3, 3600.0 * hours[model] * 30.0, np.nan)
        return lambda: dataclasses.replace(
            from_arrays(
                gpu_types=tuple(f"type-{j}" for j in range(k)),
                capacity=capacity,
                throughput=T,
                gpus=np.ones(jobs),
                options=options,
            ),
            weights=weights[model],
            elapsed=waited,
            isolated_elapsed=0.5 * waited,
            deadlines=deadlines,
            usd_per_hour={f"type-{j}": 0.3 * of_type[j] ** 1.2 for j in range(k)},
            steps_remaining=steps,
        )


FAMILIES = (
    *(ElasticFamily(name=f"demand {demand:g}", demand=demand) for demand in (20.0, 5.0, 2.0, 1.0, 0.25)),
    ElasticFamily(name="one type each", mixed=0.0),
    ElasticFamily(name="all mixed", mixed=1.0),
    ElasticFamily(name="nearly proportional", power=(0.98, 1.0), noise=0.01),
    ElasticFamily(name="hardly faster when larger", power=(0.05, 0.2)),
    ElasticFamily(name="noisy", noise=0.5),
    ElasticFamily(name="like jobs", models=30),
    ElasticFamily(name="heavy tails", tails=True),
    ElasticFamily(name="200 configurations", configurations=200),
    ElasticFamily(name="two types", types=2),
    ElasticFamily(name="beside gangs", gangs=0.5),
)


def _timed(family: ElasticFamily, jobs: int, seed: int, policy: str, plain: bool, to: Connection) -> None:
    """Solve in a process of its own, which sends (CPU seconds, seconds, gap, objective)."""
    solve(policy, FAMILIES[0].drawn(20)())  # imports and first calls are not the solve
    build = family.drawn(jobs, seed)
    if plain:
        methods.LARGE_ELASTIC = 10**9
    to.send(None)
    clock, cpu = time.perf_counter(), time.process_time()
    answer = solve(policy, build())
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    to.send((cpu, clock, answer.gap, answer.objective))


def measured(
    family: ElasticFamily, jobs: int, policy: str, *, seed: int, limit: float, plain: bool
) -> tuple[float, float, float, float] | str:
    """(CPU seconds, seconds, gap, objective) of a solve in a process of its own, or why there are none."""
    here, there = multiprocessing.Pipe(duplex=False)
    arguments: tuple[Any, ...] = (family, jobs, seed, policy, plain, there)
    process = multiprocessing.Process(target=_timed, args=arguments)
    process.start()
    there.close()
    try:
        here.recv()
        if not here.poll(limit):
            return f"over {limit:g}"
        found: tuple[float, float, float, float] = here.recv()
        return found
    except EOFError:
        return "failed"
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", nargs="+", default=list(EXACT), choices=list(POLICIES))
    parser.add_argument("--family", nargs="+", help="parts of names; all families where left out")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--plain", type=int, nargs="*", default=[], help="of --jobs, also by HiGHS alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each solve")
    options = parser.parse_args()
    for jobs in options.jobs:
        print(f"\n{jobs} jobs: CPU seconds (seconds), gap; plain linear program: ratio of CPU seconds\n")
        print(f"| family | {' | '.join(options.policy)} |\n|---|{'---|' * len(options.policy)}", flush=True)
        for family in FAMILIES:
            if options.family and not any(part in family.name for part in options.family):
                continue
            print(f"| {family.name} ", end="", flush=True)
            for policy in options.policy:
                found = measured(family, jobs, policy, seed=options.seed, limit=options.limit, plain=False)
                print("|", found if isinstance(found, str) else _cell(found), end=" ", flush=True)
                if jobs in options.plain and not isinstance(found, str):
                    other = measured(family, jobs, policy, seed=options.seed, limit=options.limit, plain=True)
                    ratio = (options.limit if isinstance(other, str) else other[0]) / found[0]
                    print(
                        f"; plain {'> ' if isinstance(other, str) else ''}{ratio:.1f} x", end=" ", flush=True
                    )
            print("|", flush=True)


def _cell(found: tuple[float, float, float, float]) -> str:
    cpu, clock, gap, _ = found
    return f"{cpu:.2f} ({clock:.2f}), {gap:.0e}"


if __name__ == "__main__":
    main()
