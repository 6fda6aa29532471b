"""Jobs whose plans are looked for by mix of GPUs: seconds, proven gap, ratio to the whole list.

    python benchmarks/allocation/planned.py --jobs 1000
    python benchmarks/allocation/planned.py --jobs 50 --whole

No two jobs are alike: layers, memory, batch and liking of GPU types are drawn for each. A job has 390 mixes
of one or two of five types, up to 32 GPUs of each, or 375 of up to three, with all data degrees and
microbatch sizes. Each solve is
in a process of its own; seconds are CPU seconds. ``--whole`` also has every mix planned and the program with
all of them solved: the ratio of both objectives, and its CPU seconds.
"""

import argparse
import dataclasses
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
from ballast_policies.allocation.generated import allocate_generated
from ballast_policies.allocation.planned_gangs import PlannedGang, TensorProfile
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.planning.profile import ProfiledLayer

WITHIN = 0.01
TYPES = tuple(f"type-{j}" for j in range(5))
BATCHES = (32, 64, 128)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFamily:
    """Jobs of one kind.

    Attributes:
        uneven: how much layers differ.
        memory, links: they are limited.
        sizes, most_types: of the mixes.
        zero_stage: what replicas share.
    """

    name: str
    uneven: float = 0.05
    memory: bool = False
    links: bool = False
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    most_types: int = 2
    zero_stage: int = 0

    def drawn(self, jobs: int, seed: int) -> tuple[Problem, dict[str, PlannedGang]]:
        """The cluster with its jobs, and their plans to be."""
        draw = np.random.default_rng(seed)
        of_type = np.sort(draw.uniform(1.0, 8.0, len(TYPES)))
        memory = dict(zip(TYPES, (16e9, 24e9, 32e9, 40e9, 80e9), strict=True)) if self.memory else {}
        gangs = {}
        for m in range(jobs):
            liking = of_type ** draw.uniform(0.3, 1.2) * np.exp(0.3 * draw.standard_normal(len(TYPES)))
            count = int(draw.choice([24, 32, 48]))
            work = np.exp(self.uneven * draw.standard_normal(count))
            work[-1] *= draw.uniform(1.0, 3.0)  # a head
            seconds = 10 ** draw.uniform(-2.0, -1.0) * work
            weights = 10 ** draw.uniform(7.0, 8.5) * work
            fixed = draw.uniform(0.05, 0.3)
            layers = tuple(
                ProfiledLayer(
                    forward_seconds=s / 3,
                    backward_seconds=2 * s / 3,
                    overhead_seconds=fixed * s,
                    held_bytes=4 * w,
                    weight_bytes=w,
                    activation_bytes=0.5 * w,
                    output_bytes=4e6,
                )
                for s, w in zip(seconds.tolist(), weights.tolist(), strict=True)
            )
            gangs[f"job-{m}"] = PlannedGang(
                profiles=(TensorProfile(microbatch_size=4, layers=layers),),
                speeds=dict(zip(TYPES, liking.tolist(), strict=True)),
                batch_size=int(draw.choice(BATCHES)),
                sizes=self.sizes,
                most_types=self.most_types,
                zero_stage=self.zero_stage,
                memory_bytes=memory,
                bandwidth=1e10 if self.links else None,
            )
        capacity = np.maximum(64, np.floor(draw.dirichlet(np.full(len(TYPES), 5.0)) * 4 * jobs)).astype(int)
        steps, weights = 10 ** draw.uniform(4, 6, jobs), draw.choice([1.0, 5.0], jobs, p=[0.8, 0.2])
        posed = tuple(
            Job(name=name, steps_remaining=float(n), weight=float(w))
            for name, n, w in zip(gangs, steps, weights, strict=True)
        )
        counts = dict(zip(TYPES, capacity.tolist(), strict=True))
        return Problem(gpu_types=TYPES, capacity=counts, jobs=posed), gangs


FAMILIES = (
    PlannedFamily(name="blocks"),
    PlannedFamily(name="uneven layers", uneven=0.4),
    PlannedFamily(name="links", links=True),
    PlannedFamily(name="memory", memory=True),
    PlannedFamily(name="memory, links, uneven", memory=True, links=True, uneven=0.4),
    PlannedFamily(name="three types", memory=True, links=True, sizes=(2, 8, 32), most_types=3),
    PlannedFamily(name="ZeRO-1", memory=True, links=True, zero_stage=1),
    PlannedFamily(name="ZeRO-3", memory=True, links=True, zero_stage=3),
)


def _timed(family: PlannedFamily, jobs: int, seed: int, policy: str, whole: bool, to: Connection) -> None:
    allocate_generated(policy, *family.drawn(3, seed), within=WITHIN)  # imports are not the solve
    problem, gangs = family.drawn(jobs, seed)
    begun = time.process_time()
    if whole:
        listed = [
            dataclasses.replace(job, configurations=gangs[job.name].listed(problem.capacity) or ())
            for job in problem.jobs
        ]
        found = allocate(policy, dataclasses.replace(problem, jobs=tuple(listed)))
    else:
        found = allocate_generated(policy, problem, gangs, within=WITHIN).allocation
    to.send((time.process_time() - begun, found.objective, found.gap))


def measured(
    family: PlannedFamily, jobs: int, seed: int, policy: str, *, whole: bool
) -> tuple[float, float, float]:
    """(CPU seconds, objective, gap) of a solve in a process of its own."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_timed, args=(family, jobs, seed, policy, whole, there))
    process.start()
    there.close()
    try:
        found: tuple[float, float, float] = here.recv()
        return found
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--policy", default="max-min-fairness")
    parser.add_argument("--family", nargs="+", help="parts of names; all families where left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="also with every mix planned and listed")
    options = parser.parse_args()
    print(
        f"{options.jobs} jobs, {options.policy}\n\n| family | CPU s | gap | whole list |\n|---|---|---|---|"
    )
    for family in FAMILIES:
        if options.family and not any(part in family.name for part in options.family):
            continue
        seconds, objective, gap = measured(family, options.jobs, options.seed, options.policy, whole=False)
        beside = ""
        if options.whole:
            other, best, _ = measured(family, options.jobs, options.seed, options.policy, whole=True)
            beside = f"{objective / best:.4f}, {other:.1f} s"
        print(f"| {family.name} | {seconds:.1f} | {gap:.1e} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
