"""DynMo's tables, simulated: balancing, scaling, overheads, repacking and unstable networks."""

import functools
import json
import time

import numpy as np
from ballast_lab.comparison import Comparison, Point
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.network import network_aware_partition, steady_period_seconds
from ballast_policies.planning.balancers.registry import BalancerInput
from ballast_policies.planning.balancers.subset import RankSubsets
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.rebalance import decide_rebalance
from ballast_policies.planning.repack import repack
from ballast_policies.planning.step_time import predict_step_seconds
from load_curves import AT_KNOWN_STEPS, CURVES, pruning, strength_of, training
from rebalanced.following import PAUSE_SECONDS, follow

SCALING = {
    # Layers: GPUs -> Megatron-LM's samples/s and the speed-up of the better balancer.
    24: {2: (10.67, 1.20), 4: (20.23, 1.22), 8: (37.253, 1.26)},
    32: {2: (8.28, 1.25), 4: (15.69, 1.26), 8: (30.809, 1.29)},
    40: {2: (7.14, 1.28), 4: (12.84, 1.31), 8: (26.425, 1.33)},
    48: {4: (10.89, 1.35), 8: (23.126, 1.37)},
    56: {8: (19.126, 1.39)},
}

ITERATIONS = {
    # Layers: partition by time, by parameters, diffusion by time, by parameters.
    24: (25, 61, 12, 18),
    32: (9, 55, 7, 20),
    40: (12, 56, 11, 18),
    48: (13, 54, 4, 13),
    56: (14, 59, 9, 13),
}

BALANCERS = (("exact", False), ("exact", True), ("diffusion", False), ("diffusion", True))

STEPS, CHANGED_EVERY = 800, 20

MIN_GAIN = 0.02

TRAINING, PRUNED_EVERY = 10_000, 1000

PAUSE_STEPS = 0.5
"""Steps that a move takes: 60 ms of 120 in the example of freezing on four real ranks."""

MICROBATCHES = 32

BANDWIDTHS = (1.0, 2.0, 4.0)


def followed(case, *, ranks, layers):
    """A training of 800 steps whose loads change every 20, by predicted steps of 1F1B."""
    loads = training(case, layers=layers, steps=STEPS, stretch=CHANGED_EVERY).sum(axis=2)
    unit = 0.1 * ranks / loads[-1].sum()

    def step(cut, row):
        return predict_step_seconds(cut.loads(row), MICROBATCHES)

    even, best_that_stays = even_partition(layers, ranks), exact_partition(loads.mean(axis=0), ranks)
    followed = follow(unit * loads, even, MICROBATCHES, told=case in AT_KNOWN_STEPS, min_gain=MIN_GAIN)
    spent, cache, moves = np.zeros(4), {}, followed.moves
    for number, (row, partition) in enumerate(zip(unit * loads, followed.partitions, strict=True)):
        key = (number // CHANGED_EVERY, partition.bounds)
        if key not in cache:
            ways = (even, best_that_stays, partition, exact_partition(row, ranks))
            cache[key] = np.array([step(cut, row) for cut in ways])
        spent += cache[key]
    spent[2] += followed.overhead
    return {
        "case": case,
        "ranks": ranks,
        "even": spent[0] / spent[2],
        "stays": spent[1] / spent[2],
        "allowed": spent[1] / spent[3],
        "of_the_best": spent[3] / spent[2],
        "moves": moves,
        "overhead": moves * PAUSE_SECONDS / spent[2],
    }


def six_cases():
    return [{**followed(case, ranks=8, layers=64), "settled": strength_of(case)[1]} for case in CURVES]


def scaling_by_ranks():
    return [followed(case, ranks=ranks, layers=6 * ranks) for case in CURVES for ranks in (4, 8, 16)]


def pruned(layers, progress, strength):
    return pruning(layers, progress, strength).sum(axis=1)


def seconds_of(layers, ranks, cut, strength):
    """Mean step of a training of 10,000, pruned every 1,000 until it is done to five eighths."""
    total = []
    for stretch in range(TRAINING // PRUNED_EVERY):
        row = pruned(layers, min(1.0, stretch / 6), strength)
        total.append(predict_step_seconds(cut(row, ranks).loads(row), MICROBATCHES))
    return float(np.mean(total))


@functools.cache
def table_2_strength():
    """Strength of pruning at which 24 layers on 8 GPUs gain what the paper prints."""

    def gain(strength):
        static = seconds_of(24, 8, lambda row, p: even_partition(len(row), p), strength)
        return static / seconds_of(24, 8, exact_partition, strength)

    return min(np.linspace(0.05, 8, 160), key=lambda strength: abs(gain(strength) - SCALING[24][8][1]))


def scaling():
    strength = table_2_strength()
    return [
        {
            "layers": layers,
            "gpus": gpus,
            "published": published,
            "ours": seconds_of(layers, gpus, lambda row, p: even_partition(len(row), p), strength)
            / seconds_of(layers, gpus, exact_partition, strength),
        }
        for layers, by_gpus in SCALING.items()
        for gpus, (_, published) in by_gpus.items()
    ]


def overheads():
    """Iterations that 10,000 with pruning lose to deciding and moving, by balancer."""
    strength, rows = table_2_strength(), []
    for layers, published in ITERATIONS.items():
        ours = []
        for method, by_parameters in BALANCERS:
            partition, moves, looks, began = even_partition(layers, 8), 0, 0, time.process_time()
            for stretch in range(TRAINING // PRUNED_EVERY):
                row = pruned(layers, min(1.0, stretch / 6), strength)
                decision = decide_rebalance(
                    BalancerInput(
                        partition=partition,
                        seconds=row,
                        microbatches=MICROBATCHES,
                        # What is left of a layer's weights follows its cost here.
                        balanced=row / row.sum() if by_parameters else None,
                    ),
                    min_gain=0.02,
                    horizon_steps=PRUNED_EVERY,
                    move_seconds=PAUSE_STEPS * float(row.sum()) / 8,
                    method=method,
                )
                looks, moves = looks + 1, moves + decision.rebalance
                partition = decision.partition
            decide = (time.process_time() - began) / looks
            ours.append({"moves": moves, "looks": looks, "decide_ms": round(1000 * decide, 2)})
        rows.append({"layers": layers, "published": published, "ours": ours})
    return rows


def repacking():
    """Throughput of a GPU as the pruned model is packed, relative to 8, and the mean number of GPUs."""
    strength, rows = table_2_strength(), []
    for layers in ITERATIONS:
        settled = pruned(layers, 1.0, strength)
        steps = {
            ranks: predict_step_seconds(exact_partition(settled, ranks).loads(settled), MICROBATCHES)
            for ranks in (8, 6, 4, 2)
        }
        first = pruned(layers, 0.0, strength)
        reference = predict_step_seconds(exact_partition(first, 8).loads(first), MICROBATCHES)
        partition, used = exact_partition(first, 8), []
        for stretch in range(TRAINING // PRUNED_EVERY):
            row = pruned(layers, min(1.0, stretch / 6), strength)
            partition = exact_partition(row, partition.ranks)
            decision = repack(
                RankSubsets(partition, row),
                microbatches=MICROBATCHES,
                min_ranks=2,
                reference_step_seconds=reference,
            )
            if decision.repack:
                partition = exact_partition(row, decision.partition.ranks)
            used.append(partition.ranks)
        rows.append(
            {
                "layers": layers,
                "per_gpu": {r: (steps[8] * 8) / (step * r) for r, step in steps.items()},
                "throughput": {r: steps[8] / step for r, step in steps.items()},
                "mean_gpus": float(np.mean(used)),
            }
        )
    return rows


def unstable_network():
    """90 pipelines of 8: a step lasts as long as the slowest pipeline; links up to 4 times slower."""
    generator, strength, rows = np.random.default_rng(0), table_2_strength(), []
    for layers in (24, 40, 56):
        settled = pruned(layers, 1.0, strength)
        unit = settled.sum() / 8
        for slowest in BANDWIDTHS:
            steps = {"static": [], "exact": [], "network": []}
            for _ in range(90):
                # A transfer takes a tenth of a stage at full bandwidth; delays are half normal, to the limit.
                factors = 1 + np.minimum(np.abs(generator.normal(size=7)) / 2, 1) * (slowest - 1)
                links = 0.1 * unit * factors
                cuts = {
                    "static": even_partition(layers, 8),
                    "exact": exact_partition(settled, 8),
                    "network": network_aware_partition(
                        settled, 8, boundary_seconds=[0.1 * unit] * (layers - 1), link_factors=factors
                    ),
                }
                for name, cut in cuts.items():
                    loads = cut.loads(settled)
                    period = steady_period_seconds(loads, links)
                    steps[name].append((MICROBATCHES - 1) * period + loads.sum() + 2 * links.sum())
            worst = {name: max(found) for name, found in steps.items()}
            rows.append(
                {
                    "layers": layers,
                    "slowest": slowest,
                    "exact": worst["static"] / worst["exact"],
                    "network": worst["static"] / worst["network"],
                }
            )
    return rows


def judged(rows, points):
    """The rows, one a line, and what of them has a band: (what, published, ours, least, most)."""
    text = "\n".join(
        json.dumps(json.loads(json.dumps(row), parse_float=lambda x: round(float(x), 4))) for row in rows
    )
    return Comparison(tuple(Point(*each) for each in points), text)


def cases_judged():
    """Part of what the best cut of every step reaches, by case: rebalancing follows the loads."""
    rows = six_cases()
    return judged(rows, [(row["case"], "-", row["of_the_best"], 0.95, 1.0) for row in rows])


def overheads_judged():
    """Iterations lost, at most as many as published."""
    rows = overheads()
    return judged(
        rows,
        [
            (f"{row['layers']} layers, {method}", f"{published}", PAUSE_STEPS * ours["moves"], 0.0, published)
            for row in rows
            for (method, _), published, ours in zip(BALANCERS, row["published"], row["ours"], strict=True)
        ],
    )


def unstable_judged():
    """Balanced pipelines win at each speed of links, the more so by the balancer that knows the links."""
    rows = unstable_network()
    named = [(f"{row['layers']} layers, {row['slowest']:.0f}", row) for row in rows]
    return judged(
        rows,
        [(f"{name}: over even", "more", row["network"], 1.01, 2.0) for name, row in named]
        + [(f"{name}: with links", "-", row["network"] / row["exact"], 0.99, 1.5) for name, row in named],
    )


def repacking_judged():
    """Throughput of a GPU rises with each release."""
    rows = repacking()
    return judged(
        rows,
        [
            (
                f"{row['layers']} layers, {few} over {many}",
                "rises",
                row["per_gpu"][few] / row["per_gpu"][many],
                1.0,
                8.0,
            )
            for row in rows
            for many, few in ((8, 6), (6, 4), (4, 2))
        ],
    )
