"""Changing loads and how well they are followed, over families of changes: medians, and what is expected.

Each training is followed by the trainer's own profile, looks and decisions (``following.py``), in steps of
1F1B by the closed form. ``percent`` is the time of the best cut of every step, known in advance and moved to
for nothing, over the time taken, looks and moves included. Ways:

- ``medians``: layers cost the median of the steps measured, minGain 5 %, noise is not weighed;
- ``expected``: as the trainer does it, by its default minGain;
- ``expected, minGain 2 %``: as the examples of changing models state.

Families: the six cases at steps of 10, or smooth ones; loads that swing, jump, or do not change and are noisy
(there ``moves`` counts: the first partition is the best one). ``noise`` is that of a measured layer.

    python benchmarks/trainer/rebalanced/families.py [--record]
"""

import json
import sys
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.step_time import predict_step_seconds
from ballast_trainer.profiling.profile import Profile
from load_curves import AT_KNOWN_STEPS, CURVES, training
from rebalanced.following import MIN_GAIN, Medians, follow

RECORDED = Path(__file__).with_name("families_recorded.json")
MICROBATCHES, STAGE_SECONDS = 32, 0.8
WAYS = {
    "medians": {"profile": Medians, "min_gain": 0.05, "weighs_noise": False},
    "expected": {"profile": Profile, "min_gain": MIN_GAIN},
    "expected, minGain 2 %": {"profile": Profile, "min_gain": 0.02},
}


def scaled(loads, ranks):
    """Loads in seconds: a stage of the last step, evenly divided, takes 0.8."""
    return loads * (STAGE_SECONDS * ranks / loads[-1].sum())


def families():
    """(name, loads, ranks, noise, whether the steps of changes are known)."""
    for case in CURVES:
        loads = training(case, layers=24, steps=1600, stretch=10).sum(axis=2)
        yield f"{case}, every 10 steps", scaled(loads, 4), 4, 0.05, case in AT_KNOWN_STEPS
    for case in ("earlyExit", "sparseAttention", "pruning"):
        for ranks in (8, 16):
            loads = training(case, layers=6 * ranks, steps=600, stretch=1).sum(axis=2)
            yield f"{case}, smooth", scaled(loads, ranks), ranks, 0.05, False
    random, steps = np.random.default_rng(5), np.arange(600)[:, None]
    layers = random.lognormal(0, 0.4, 24)
    for period in (60, 300):
        swing = 1 + 0.6 * np.sin(2 * np.pi * (steps / period + np.arange(24) / 24))
        yield f"swings over {period} steps", scaled(layers * swing, 4), 4, 0.05, False
    jumps = np.repeat(random.lognormal(0, 0.6, (6, 24)), 100, axis=0)
    yield "jumps every 100 steps", scaled(jumps, 4), 4, 0.05, False
    for ranks, noise in ((4, 0.1), (4, 0.2), (8, 0.1), (8, 0.2)):
        layers = np.tile(random.lognormal(0, 0.4, 6 * ranks), (800, 1))
        yield "constant", scaled(layers, ranks), ranks, noise, False


def measure(name, loads, ranks, noise, told):
    rows, index = np.unique(loads, axis=0, return_inverse=True)
    counts = np.bincount(index.ravel())
    best = sum(
        count * predict_step_seconds(exact_partition(row, ranks).loads(row), MICROBATCHES)
        for row, count in zip(rows, counts, strict=True)
    )
    start = exact_partition(loads[0], ranks) if name == "constant" else even_partition(loads.shape[1], ranks)
    found = {}
    for way, by in WAYS.items():
        followed = follow(loads, start, MICROBATCHES, told=told, noise=noise, **by)
        spent = followed.overhead + sum(
            predict_step_seconds(partition.loads(row), MICROBATCHES)
            for partition, row in zip(followed.partitions, loads, strict=True)
        )
        found[way] = {"percent": round(100 * best / spent, 2), "moves": followed.moves}
    return {"family": name, "ranks": ranks, "noise": noise, **found}


@click.command(help=__doc__)
@click.option("--record", is_flag=True, help=f"Write {RECORDED.name}, too.")
def main(record):
    rows = []
    for family in families():
        rows.append(measure(*family))
        click.echo(json.dumps(rows[-1]))
    if record:
        RECORDED.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
