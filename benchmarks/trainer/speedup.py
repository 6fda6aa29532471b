"""Rebalancing against the best static split for six dynamic models: simulated and run, beside the paper.

For each case a training is timed three ways:

- start: the split that is best for the first step, for the whole training (what Megatron does, and
  what the paper compares with);
- hindsight: the one split that is best for the whole training, found by knowing all of it;
- rebalanced: the trainer measures, decides and moves by itself.

Two ceilings, and the part of each that is reached:

- ``allowed``, ``percent``: the sum over the steps of the largest stage load under the static split, over that
  under the exact partition of each step: what the load ratios allow. With so many microbatches, filling and
  draining the pipeline take their part of every step, whatever is moved: no partition reaches all of it.
- ``possible``, ``percent_of_possible``: the time of the static split over that of the best cut of every step,
  known in advance and moved to for nothing, with the schedule played: what a partition can reach.

The loads are curves whose one parameter
makes the paper's speed-up possible on its 8 stages (``load_curves.py``), since the paper does not
publish its loads; with fewer ranks and layers less is allowed.

    python benchmarks/trainer/speedup.py [--case earlyExit] [--simulate] [--ranks 4] [--layers 24]

Simulated: 1,600 steps; loads change every 10 until five eighths of the training are done. The trainer's own
profile, looks and decisions follow (``rebalanced/following.py``) with its default minGain; freezing and
pruning change at steps that the trainer knows, the other cases at none. A look costs 10 ms, a move 50.

Run: real ranks whose layers sleep (``calibrated.py``). The training is eight stretches of equal
loads; a stretch stands for 100 steps. Static runs do two steps of each and count the faster one 100 times.
The rebalanced run does three of each and decides after each; as if it looked every 20 steps, the
step before the move counts 10 times and the faster one after it 90 times. Its overhead is printed apart,
in seconds a decision and a move, and as a share of the time between two decisions at the default interval.
``expected`` is what the simulator says of the run's own partitions, once it is told what an action costs
besides its layers here (as in ``prediction.py``, from the first step): four ranks share two
cores, so each microbatch takes milliseconds that no partition saves; of stages as long as a GPU's
(``--stage-milliseconds 100``), they are a small part. ``possible`` is played with the same
number: on a machine with other work, where that one step was no measure, more than all of it may be reached.

The target is 98 % of what is allowed in the simulator, 95 % on real ranks, and an overhead under 1 %.
"""

import json
import time

import calibrated
import click
import numpy as np
from ballast_lab.simulated_steps import fitted_action_seconds
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.partition import Partition, even_partition
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.profile import KEPT_STEPS, MEASURED_EVERY
from load_curves import AT_KNOWN_STEPS, CURVES, PUBLISHED, strength_of, training
from rebalanced.predicted import best_cut, hindsight, largest, simulate, simulated_step, stretches

STRETCHES = 8
STEPS_A_STRETCH = 100
STEPS_BEFORE_A_MOVE = 10
DEFAULT_INTERVAL = 20


def run(loads, splits, microbatches, min_gain):
    """Measured seconds of the training by way, and the overhead of the rebalanced one."""
    ranks = splits["start"].ranks
    rows, counts = zip(*stretches(loads), strict=True)
    whole = STEPS_A_STRETCH * np.array(counts)
    first = rows[0]
    spent, expected = {}, {}
    action = 0.0
    for name, split in splits.items():
        job = calibrated.Job(
            # The first step warms up.
            loads=np.concatenate([rows[:1], np.repeat(rows, 2, axis=0)]),
            ranks=ranks,
            bounds=split.bounds,
            microbatches=microbatches,
        )
        seconds = list(calibrated.run(job).step_seconds().values())[1:]
        faster = np.array(seconds).reshape(-1, 2).min(axis=1)
        spent[name] = np.dot(whole, faster)
        if name == "start":
            action = fitted_action_seconds(
                faster[0], lambda each: simulated_step(first, splits["start"], microbatches, each)
            )
        expected[name] = np.dot(whole, [simulated_step(row, split, microbatches, action) for row in rows])
    cuts = [best_cut(row, microbatches, splits["start"], action) for row in rows]
    best = [simulated_step(*each, microbatches, action) for each in zip(rows, cuts, strict=True)]
    spent["best"] = expected["best"] = np.dot(whole, best)
    job = calibrated.Job(
        loads=np.concatenate([rows[:1], np.repeat(rows, 3, axis=0)]),
        ranks=ranks,
        bounds=splits["start"].bounds,
        microbatches=microbatches,
        settings={"rebalance": {"enabled": True, "everySteps": 1, "minGain": min_gain}},
    )
    ran = calibrated.run(job)
    lines = [line for line in ran.lines if "event" not in line][1:]
    simulated = [
        simulated_step(row, bounds_of(line), microbatches, action)
        for row, line in zip(np.repeat(rows, 3, axis=0), lines, strict=True)
    ]
    for found, seconds in ((spent, [line["step_seconds"] for line in lines]), (expected, simulated)):
        each = np.array(seconds).reshape(-1, 3)
        found["rebalanced"] = np.dot(
            whole,
            each[:, 0] * STEPS_BEFORE_A_MOVE / STEPS_A_STRETCH
            + each[:, 1:].min(axis=1) * (1 - STEPS_BEFORE_A_MOVE / STEPS_A_STRETCH),
        )
    steps = STEPS_A_STRETCH * sum(counts)
    moves = len(ran.events("rebalance"))
    # After a change eight steps are measured by layer, then one in eight.
    measured = KEPT_STEPS + (DEFAULT_INTERVAL - KEPT_STEPS) / MEASURED_EVERY
    each = {
        "profile": measured * profile_seconds(loads.shape[1], ranks, microbatches),
        "decide": ran.overhead.deciding / (len(job.loads) - 1),
        "move": ran.overhead.moving / max(1, moves),
    }
    decisions = steps / DEFAULT_INTERVAL
    spent["rebalanced"] += decisions * each["decide"] + moves * each["move"]
    interval = DEFAULT_INTERVAL * spent["rebalanced"] / steps
    overhead = {
        "moves": moves,
        "seconds_each": {name: round(value, 5) for name, value in each.items()},
        "percent_at_default_interval": {
            **{name: round(100 * value / interval, 3) for name, value in each.items()},
            "whole": round(100 * sum(each.values()) / interval, 3),
        },
    }
    overhead["action_milliseconds"] = round(1000 * float(action), 2)
    return spent, expected, overhead


def bounds_of(line):
    """The partition of a step line."""
    return Partition(bounds=(0, *(stage["endLayer"] for stage in line["stages"])))


def profile_seconds(layers, ranks, microbatches):
    """Cost a step of telling layers apart, on the rank of most layers: calls of the meter, timed alone."""
    import torch

    meter = Meter(layers, torch.device("cpu"), None)
    meter.begin(0, meter.forward, 0)
    began = time.perf_counter()
    for _ in range(2000):
        meter.enter(0)
    call = (time.perf_counter() - began) / 2000
    # Forward and backward, each microbatch, at most all but one layer for every other rank.
    return call * 2 * microbatches * (layers - ranks + 1)


def shares(spent, allowed):
    row = {}
    for name in ("start", "hindsight"):
        reached = spent[name] / spent["rebalanced"]
        row[name] = {
            "reached": round(float(reached), 3),
            "allowed": round(allowed[name], 3),
            "percent": round(float(100 * reached / allowed[name]), 1),
            "possible": round(float(spent[name] / spent["best"]), 3),
            "percent_of_possible": round(float(100 * spent["best"] / spent["rebalanced"]), 1),
        }
    return row


def allowed_ratios(loads, splits):
    ranks = splits["start"].ranks
    best = sum(
        count * exact_partition(row.sum(axis=1), ranks).loads(row.sum(axis=1)).max()
        for row, count in stretches(loads)
    )
    return {name: float(largest(loads, split) / best) for name, split in splits.items()}


def measure(case, *, ranks, layers, microbatches, milliseconds, min_gain, simulate_only):
    settled = CURVES[case](layers, 1.0, strength_of(case)[0])
    unit = milliseconds / 1000 * ranks / settled.sum()
    strength, fitted = strength_of(case)
    slow = unit * training(case, layers=layers, steps=1600, stretch=10)
    spent, moves, slow_splits = simulate(slow, ranks, microbatches, case in AT_KNOWN_STEPS)
    row = {
        "benchmark": "trainer_speedup",
        "case": case,
        "published": PUBLISHED[case],
        "settled_load_ratio_on_8_stages": round(fitted, 3),
        "strength": round(strength, 2),
        "ranks": ranks,
        "layers": layers,
        "microbatches": microbatches,
        "simulated": {**shares(spent, allowed_ratios(slow, slow_splits)), "moves": moves},
    }
    if not simulate_only:
        loads = unit * training(case, layers=layers, steps=STRETCHES, stretch=1)
        splits = {
            "start": even_partition(layers, ranks),
            "hindsight": hindsight(loads, ranks, microbatches),
        }
        spent, expected, overhead = run(loads, splits, microbatches, min_gain)
        row["run"] = {
            "layers": calibrated.SAYS,
            **shares(spent, allowed_ratios(loads, splits)),
            "expected": {name: round(float(expected[name] / expected["rebalanced"]), 3) for name in splits},
            "overhead": overhead,
        }
    return row


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CURVES)), help="Default: all six.")
@click.option("--ranks", default=4, show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--microbatches", default=32, show_default=True)
@click.option(
    "--stage-milliseconds",
    "milliseconds",
    default=25.0,
    show_default=True,
    help="Forward and backward of a microbatch on a stage of the settled model, evenly divided.",
)
@click.option("--min-gain", default=0.05, show_default=True, help="rebalance.minGain of the run.")
@click.option("--simulate", "simulate_only", is_flag=True, help="No run, only the simulator.")
def main(cases, ranks, layers, microbatches, milliseconds, min_gain, simulate_only):
    for case in cases or CURVES:
        row = measure(
            case,
            ranks=ranks,
            layers=layers,
            microbatches=microbatches,
            milliseconds=milliseconds,
            min_gain=min_gain,
            simulate_only=simulate_only,
        )
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
