"""A training whose loads change, in the simulator: static by the best cuts, and rebalanced."""

import itertools

import numpy as np
from ballast_policies.planning import (
    decide_rebalance,
    even_partition,
    exact_partition,
)
from ballast_policies.planning.balancers import refine
from ballast_policies.planning.following.looking import Waiting, lost_seconds
from ballast_policies.planning.step_time import simulated_step_seconds

PAUSE_SECONDS = 0.05

DECIDE_SECONDS = 0.01

MEASURED_STEPS = 3

MIN_GAIN = 0.02


def stretches(loads):
    """(loads, steps) of each stretch of equal loads."""
    for _, group in itertools.groupby(loads, key=lambda row: row.tobytes()):
        rows = list(group)
        yield rows[0], len(rows)


def hindsight(loads, ranks, microbatches):
    """The partition with the shortest whole training (closed form), by chain moves from several starts."""
    rows, counts = zip(*stretches(loads), strict=True)
    seconds = np.array([row.sum(axis=1) for row in rows])
    held = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(seconds, axis=1)], axis=1)

    def total(partition):
        bounds = np.array(partition.bounds)
        stage = held[:, bounds[1:]] - held[:, bounds[:-1]]
        return float(np.dot(counts, (microbatches - 1) * stage.max(axis=1) + stage.sum(axis=1)))

    starts = {exact_partition(row, ranks) for row in seconds}
    starts.add(exact_partition(np.dot(counts, seconds), ranks))
    return min((refine(start, total, most_evaluations=4000) for start in starts), key=total)


def largest(loads, partition):
    """Sum over the steps of the largest stage load."""
    return sum(count * partition.loads(row.sum(axis=1)).max() for row, count in stretches(loads))


def simulated_step(row, partition, microbatches, action_seconds=0.0):
    return simulated_step_seconds(
        microbatches * partition.loads(row[:, 0]),
        microbatches * partition.loads(row[:, 1]),
        microbatches,
        action_seconds=action_seconds,
    )


def simulate(loads, ranks, microbatches):
    """Seconds of the training: static by partition, rebalanced, and how often it moved."""
    start = even_partition(loads.shape[1], ranks)
    splits = {"start": start, "hindsight": hindsight(loads, ranks, microbatches)}
    spent = {
        name: sum(n * simulated_step(row, split, microbatches) for row, n in stretches(loads))
        for name, split in splits.items()
    }
    partition, seconds, moves, cache, waiting = start, 0.0, 0, {}, Waiting()
    for step, row in enumerate(loads):
        # What the trainer knows of the layers is a few steps old.
        known = microbatches * loads[max(0, step - MEASURED_STEPS)].sum(axis=1)
        key = (row.tobytes(), known.tobytes(), partition.bounds)
        if key not in cache:
            cache[key] = (
                simulated_step(row, partition, microbatches),
                lost_seconds(partition, known, microbatches=microbatches, min_gain=MIN_GAIN),
            )
        seconds += cache[key][0]
        waiting = waiting.after_step(cache[key][1])
        if waiting.is_over(PAUSE_SECONDS + DECIDE_SECONDS):
            decision = decide_rebalance(
                partition,
                known,
                microbatches=microbatches,
                min_gain=MIN_GAIN,
                horizon_steps=len(loads) - step,
                move_seconds=PAUSE_SECONDS,
            )
            waiting = waiting.after_look(moved=decision.rebalance)
            seconds += DECIDE_SECONDS
            if decision.rebalance:
                partition, moves = decision.partition, moves + 1
                seconds += PAUSE_SECONDS
    # The best cut in every step, known in time and free.
    best = sum(
        n * simulated_step(row, exact_partition(row.sum(axis=1), ranks), microbatches)
        for row, n in stretches(loads)
    )
    return {**spent, "rebalanced": seconds}, moves, splits, best / seconds
