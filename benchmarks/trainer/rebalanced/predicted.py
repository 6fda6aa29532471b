"""A training whose loads change, in the simulator: static by the best cuts, and rebalanced."""

import itertools

import numpy as np
from ballast_lab.simulated_steps import simulated_step_seconds
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.several_stages import refine
from ballast_policies.planning.partition import even_partition
from rebalanced.following import follow

PLAYED = 12
"""Neighbours of the exact partition that are played to find the best cut."""


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


def best_cut(row, microbatches, start, action_seconds=0.0):
    """Partition of known loads with the smallest largest stage, refined by playing the schedule."""

    def played(partition):
        return simulated_step(row, partition, microbatches, action_seconds)

    exact = exact_partition(row.sum(axis=1), start.ranks)
    return refine(min((exact, start), key=played), played, most_evaluations=PLAYED)


def simulate(loads, ranks, microbatches, told):
    """Seconds of the training: static by partition, rebalanced, and the best cut of every step; its moves."""
    start = even_partition(loads.shape[1], ranks)
    splits = {"start": start, "hindsight": hindsight(loads, ranks, microbatches)}
    spent = {
        name: sum(n * simulated_step(row, split, microbatches) for row, n in stretches(loads))
        for name, split in splits.items()
    }
    followed = follow(microbatches * loads.sum(axis=2), start, microbatches, told=told)
    seconds, best, cache = followed.overhead, 0.0, {}
    for row, partition in zip(loads, followed.partitions, strict=True):
        key = (row.tobytes(), partition.bounds)
        if key not in cache:
            cut = best_cut(row, microbatches, partition)
            cache[key] = tuple(simulated_step(row, each, microbatches) for each in (partition, cut))
        seconds, best = seconds + cache[key][0], best + cache[key][1]
    return {**spent, "rebalanced": seconds, "best": best}, followed.moves, splits
