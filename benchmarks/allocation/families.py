"""Policies over families of instances: seconds and proven gap for each family and number of jobs.

    python benchmarks/allocation/families.py --jobs 10000 100000
    python benchmarks/allocation/families.py --policy min-cost allox --family "demand 2" like --limit 60

Each solve runs in a process of its own that is ended at ``--limit`` seconds. Seconds are CPU seconds of the
solve, then of the clock in brackets: what else the machine does shows in the clock only. Arrays in and out
(``registry.solve``); drawing the instance and importing the solver are not counted.
"""

import argparse
import dataclasses
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
from ballast_policies.allocation.instance import Instance, from_arrays
from ballast_policies.allocation.problem import Entity
from ballast_policies.allocation.registry import POLICIES, solve

EXACT_AT_SCALE = ("max-min-fairness", "water-filling", "hierarchical", "makespan", "finish-time-fairness")
TEAMS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Distribution of instances of one kind.

    Attributes:
        name: what is special about it.
        demand: GPUs that all gangs together ask for, per GPU of the cluster.
        types: GPU types, unless the caller asks for another number.
        gangs: gangs of 1, 2, 4, 8 (70, 10, 15, 5 %) instead of single GPUs.
        weights: a fifth of the jobs has weight 5.
        models: jobs are copies of this many distinct ones; None: no two are alike.
        same_steps: copies also agree in steps and time since arrival.
        usable: part of the GPU types on which a job can run.
        tails: speeds, weights and steps have heavy tails (Pareto, lognormal of sigma 2.5).
        huge_gang: one job asks for this part of the largest pool.
        haste: deadlines are this many times sooner.
    """

    name: str
    demand: float = 2.0
    types: int = 10
    gangs: bool = True
    weights: bool = True
    models: int | None = None
    same_steps: bool = True
    usable: float = 0.9
    tails: bool = False
    huge_gang: float = 0.0
    haste: float = 1.0

    def instance(self, jobs: int, *, types: int | None = None, seed: int = 0) -> Instance:
        """An instance with speeds, steps, times since arrival, deadlines, prices and teams."""
        draw = np.random.default_rng(seed)
        k, n = types or self.types, jobs if self.models is None else min(jobs, self.models)
        speed, size = np.sort(draw.uniform(1, 8, k)), 10 ** draw.uniform(-1, 2, n)
        if self.tails:
            size = np.exp(2.5 * draw.standard_normal(n))
        T = size[:, None] * speed ** draw.uniform(0.3, 1.2, (n, 1))
        noise = 1.0 if self.tails else 0.35
        T = T * np.exp(noise * draw.standard_normal((n, k)))
        unusable = draw.random((n, k)) >= self.usable
        unusable[np.arange(n), draw.integers(0, k, n)] = False  # every job can run somewhere
        T[unusable] = 0.0
        gpus = draw.choice([1, 2, 4, 8], n, p=[0.7, 0.1, 0.15, 0.05]) if self.gangs else np.ones(n)
        weights = draw.choice([1.0, 5.0], n, p=[0.8, 0.2]) if self.weights else np.ones(n)
        hours = 10 ** draw.uniform(-0.5, 1.5, n)
        if self.tails:
            weights, hours = 1.0 + draw.pareto(1.1, n), hours * (1.0 + draw.pareto(0.9, n))
        model = np.arange(n) if self.models is None else draw.integers(0, n, jobs)
        T, gpus, weights = T[model], gpus[model].astype(float), weights[model]
        parts = draw.dirichlet(np.full(k, 5.0))
        capacity = np.maximum(8, np.floor(parts * gpus.sum() / self.demand))
        if self.huge_gang:
            gpus[0] = max(8.0, np.floor(self.huge_gang * capacity.max()))
        alike = self.models is not None and self.same_steps
        steps = T.max(axis=1) * 3600.0 * hours[model] * (1.0 if alike else draw.uniform(0.5, 1.5, jobs))
        waited = np.zeros(jobs) if alike else draw.uniform(0, 4e4, jobs)
        return dataclasses.replace(
            from_arrays(
                gpu_types=tuple(f"type-{j}" for j in range(k)),
                capacity=capacity,
                throughput=T,
                gpus=gpus,
            ),
            weights=weights,
            steps_remaining=steps,
            elapsed=waited,
            isolated_elapsed=waited * draw.uniform(0.3, 1.0, jobs),
            deadlines=np.where(
                draw.random(jobs) < 0.5,
                3600.0 * hours[model] * draw.uniform(2, 20, jobs) / self.haste,
                np.nan,
            ),
            entity_of=[f"team-{e}" for e in draw.integers(0, TEAMS, jobs)],
            entities={
                f"team-{e}": Entity(weight=1.0 + e % 3, policy="fifo" if e == TEAMS - 1 else "fairness")
                for e in range(TEAMS)
            },
            usd_per_hour={f"type-{j}": 0.3 * speed[j] ** 1.2 for j in range(k)},
        )


FAMILIES: tuple[Family, ...] = (
    *(Family(name=f"demand {demand:g}", demand=demand) for demand in (10.0, 3.0, 2.75, 2.0, 1.0, 0.5)),
    Family(name="plain, demand 10", demand=10.0, gangs=False, weights=False),
    Family(name="plain, demand 0.5", demand=0.5, gangs=False, weights=False),
    Family(name="like jobs", models=40),
    Family(name="like jobs, demand 0.5", models=40, demand=0.5),
    Family(name="like speeds, own steps", models=40, same_steps=False),
    Family(name="few usable types", usable=0.2),
    Family(name="few usable types, demand 10", usable=0.2, demand=10.0),
    Family(name="one huge gang", huge_gang=1.0),
    Family(name="heavy tails", tails=True),
    Family(name="heavy tails, demand 10", tails=True, demand=10.0),
    Family(name="heavy tails, demand 0.5", tails=True, demand=0.5),
    Family(name="two GPU types", types=2),
    Family(name="four GPU types, demand 1", types=4, demand=1.0),
    Family(name="hasty deadlines", haste=4.0),
    Family(name="hasty deadlines, demand 10", haste=4.0, demand=10.0),
)


def _timed(family: Family, jobs: int, types: int | None, seed: int, policy: str, to: Connection) -> None:
    """Solve in a process of its own, which sends (CPU seconds, seconds, gap, status)."""
    solve(policy, FAMILIES[0].instance(20))  # imports and first calls are not the solve
    instance = family.instance(jobs, types=types, seed=seed)
    to.send(None)
    clock, cpu = time.perf_counter(), time.process_time()
    answer = solve(policy, instance)
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    to.send((cpu, clock, answer.gap, answer.status))


def measured(
    family: Family, jobs: int, policy: str, *, types: int | None = None, seed: int = 0, limit: float = 120.0
) -> str:
    """A cell of the table: seconds of the CPU (of the clock), gap; or that the limit came first."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_timed, args=(family, jobs, types, seed, policy, there))
    process.start()
    there.close()
    try:
        here.recv()
        if not here.poll(limit):
            return f"over {limit:g}"
        cpu, clock, gap, status = here.recv()
    except EOFError:
        return "failed"
    finally:
        process.kill()
        process.join()
    proof = status if gap is None else f"gap {gap:.0e}"
    return f"{cpu:.2f} ({clock:.2f}), {proof}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", nargs="+", default=list(EXACT_AT_SCALE), choices=list(POLICIES))
    parser.add_argument("--family", nargs="+", help="parts of names; all families where left out")
    parser.add_argument("--jobs", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--types", type=int, help="GPU types instead of each family's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each solve")
    options = parser.parse_args()
    for jobs in options.jobs:
        print(f"\n{jobs} jobs: CPU seconds (seconds), gap\n")
        print(f"| family | {' | '.join(options.policy)} |\n|---|{'---|' * len(options.policy)}", flush=True)
        for family in FAMILIES:
            if options.family and not any(part in family.name for part in options.family):
                continue
            print(f"| {family.name} ", end="", flush=True)
            for policy in options.policy:
                cell = measured(
                    family, jobs, policy, types=options.types, seed=options.seed, limit=options.limit
                )
                print(f"| {cell} ", end="", flush=True)
            print("|", flush=True)


if __name__ == "__main__":
    main()
