"""Random problems over configurations and gangs, in families named by what is special about them."""

import numpy as np
from ballast_policies.allocation.problem import Configuration, Entity, Job, Problem

FAMILIES = (
    "contended",
    "idle GPUs",
    "like jobs",
    "distinct jobs",
    "mixed types",
    "gangs that never fit",
    "speeds of zero",
    "one configuration",
    "many configurations",
    "beside gangs",
    "huge and tiny speeds",
    "huge and tiny weights",
    "ties",
    "gangs alone",
)
RANGE_OF_SPEEDS = {"distinct jobs": (-2, 3), "huge and tiny speeds": (-6, 6)}
"""Powers of ten between which jobs are faster than each other; twice elsewhere."""


def problem_of(family: str, seed: int) -> Problem:
    """A problem of 1 to 6 jobs over 1 to 4 GPU types; the same for the same seed."""
    random = np.random.default_rng([FAMILIES.index(family), seed])
    types = tuple(f"type-{j}" for j in range(random.integers(1, 5)))
    jobs = int(random.integers(1, 3 if family == "many configurations" else 7))
    most = {"contended": 4, "idle GPUs": 40}.get(family, 9)
    capacity = random.integers(0 if family == "distinct jobs" else 1, most + 1, len(types))
    like = _configurations(family, random, types, 1.0)
    every = []
    for m in range(jobs):
        size = float(random.uniform(0.5, 2))
        if family in RANGE_OF_SPEEDS:
            size = float(10 ** random.uniform(*RANGE_OF_SPEEDS[family]))
        shapes = {
            "configurations": like if family == "like jobs" else _configurations(family, random, types, size)
        }
        if family == "gangs alone" or (family == "beside gangs" and random.random() < 0.5):
            speeds = (size * random.uniform(0.5, 3.0, len(types))).tolist()
            shapes = {
                "throughput": dict(zip(types, speeds, strict=True)),
                "gpus": int(random.choice([1, 2, 4])),
            }
        every.append(
            Job(
                name=f"job-{m}",
                **shapes,
                weight=_weight(family, random),
                entity=(None, "vision", "speech")[random.integers(3)],
                steps_remaining=float(size * 10 ** random.uniform(1, 4)),
                elapsed=float(random.uniform(0, 500)),
                isolated_elapsed=float(random.uniform(0, 500)),
                deadline=float(10 ** random.uniform(1, 4)) if random.random() < 0.6 else None,
            )
        )
    return Problem(
        gpu_types=types,
        capacity=dict(zip(types, capacity.tolist(), strict=True)),
        jobs=tuple(every),
        prices=dict(zip(types, random.uniform(0.3, 4.0, len(types)).tolist(), strict=True)),
        entities={"vision": Entity(weight=2.0, policy="fifo"), "speech": Entity()},
    )


def _weight(family, random):
    if family in ("like jobs", "ties"):
        return 1.0
    if family == "huge and tiny weights":
        return float(10 ** random.uniform(-3, 3))
    return float(random.uniform(0.3, 3.0))


def _configurations(family, random, types, size):
    """Speeds grow less than sizes do, and differ by type; some are no faster than a smaller one."""
    count = {"one configuration": 1, "many configurations": 200}.get(family, int(random.integers(1, 7)))
    of_type = random.uniform(0.4, 2.0, len(types))
    found = []
    for place in range(count):
        mixed = family in ("mixed types", "many configurations") and random.random() < 0.6
        chosen = random.permutation(len(types))[: random.integers(1, len(types) + 1) if mixed else 1]
        largest = 200 if family == "gangs that never fit" and random.random() < 0.5 else 9
        gpus = {types[j]: int(random.integers(1, largest)) for j in chosen}
        power = sum(of_type[types.index(t)] * n for t, n in gpus.items())
        speed = size * power ** random.uniform(0.5, 1.0)
        if family == "ties":
            speed = float(sum(gpus.values()))  # in proportion on all types: all uses of a GPU are alike
        if family == "speeds of zero" and random.random() < 0.4:
            speed = 0.0
        found.append(Configuration(name=f"shape-{place}", gpus=gpus, throughput=float(speed)))
    return tuple(found)
