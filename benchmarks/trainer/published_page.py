# ruff: noqa: E501 - lines of the page are as long as those of other pages
"""Write docs/published-dynamic-models.md: DynMo's and SEMI-migration's published values beside ours.

    python benchmarks/trainer/published_page.py [--measure]

The page is written from ``published_recorded.json``; ``--measure`` plays everything anew in the simulator (8 to
720 ranks, a few minutes of one core) and records it. Nothing is trained: what real ranks show is in
docs/figures.md.
"""

import functools
import json
import time
from pathlib import Path

import click
import numpy as np
from ballast_policies.planning import (
    decide_rebalance,
    even_partition,
    exact_partition,
    predict_step_seconds,
    repack,
)
from ballast_policies.planning.balancers.network import network_aware_partition, steady_period_seconds
from ballast_policies.planning.looking import Waiting, lost_seconds
from ballast_policies.planning.tensor_parallel import (
    LinearCost,
    MoveCosts,
    decide_semi,
    decide_workload,
    semi_seconds,
)
from load_curves import CURVES, PUBLISHED, pruning, strength_of, training

HERE = Path(__file__).resolve()
PAGE = HERE.parents[2] / "docs" / "published-dynamic-models.md"
RECORDED = HERE.with_name("published_recorded.json")

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
STEPS, CHANGED_EVERY, MEASURED_STEPS = 800, 20, 3
PAUSE_SECONDS, DECIDE_SECONDS, MIN_GAIN = 0.05, 0.005, 0.02
TRAINING, PRUNED_EVERY = 10_000, 1000
PAUSE_STEPS = 0.5
"""Steps that a move takes: 60 ms of 120 in the example of freezing on four real ranks."""
MICROBATCHES = 32
BANDWIDTHS = (1.0, 2.0, 4.0)
TABLE_1 = {
    # Seconds an epoch, by GPUs that give columns away, for gamma 0, 0.25, 0.5, 0.75, 1.
    1: ((373, 425, 451, 473, 500), (373, 478, 627, 796, 963)),
    4: ((373, 737, 846, 998, 1113), (373, 779, 971, 1198, 1436)),
}
GAMMAS = (0.0, 0.25, 0.5, 0.75, 1.0)
GROUP = 8


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def percent(ours, theirs):
    return f"{100 * (ours / theirs - 1):+.0f} %"


def followed(case, *, ranks, layers):
    """A training of 800 steps whose loads change every 20, by predicted steps of 1F1B."""
    loads = training(case, layers=layers, steps=STEPS, stretch=CHANGED_EVERY).sum(axis=2)
    unit = 0.1 * ranks / loads[-1].sum()

    def step(cut, row):
        return predict_step_seconds(cut.loads(row), MICROBATCHES)

    even, best_that_stays = even_partition(layers, ranks), exact_partition(loads.mean(axis=0), ranks)
    spent, partition, waiting, moves, cache = np.zeros(4), even, Waiting(), 0, {}
    for number, row in enumerate(unit * loads):
        known = unit * loads[max(0, number - MEASURED_STEPS)]
        key = (number // CHANGED_EVERY, known.tobytes(), partition.bounds)
        if key not in cache:
            lost = lost_seconds(partition, known, microbatches=MICROBATCHES, min_gain=MIN_GAIN)
            ways = (even, best_that_stays, partition, exact_partition(row, ranks))
            cache[key] = np.array([step(cut, row) for cut in ways]), lost
        seconds, lost = cache[key]
        spent += seconds
        waiting = waiting.after_step(lost)
        if waiting.is_over(PAUSE_SECONDS + DECIDE_SECONDS):
            decision = decide_rebalance(
                partition,
                known,
                microbatches=MICROBATCHES,
                min_gain=MIN_GAIN,
                horizon_steps=STEPS - number,
                move_seconds=PAUSE_SECONDS,
            )
            waiting, partition = waiting.after_look(moved=decision.rebalance), decision.partition
            moves += decision.rebalance
            spent[2] += DECIDE_SECONDS + decision.rebalance * PAUSE_SECONDS
    return {
        "case": case,
        "ranks": ranks,
        "even": spent[0] / spent[2],
        "stays": spent[1] / spent[2],
        "allowed": spent[1] / spent[3],
        "of_the_best": spent[3] / spent[2],
        "moves": int(moves),
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
    """How uneven pruning has to be so that 24 layers on 8 GPUs gain what the paper prints."""

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
                    partition,
                    row,
                    microbatches=MICROBATCHES,
                    min_gain=0.02,
                    horizon_steps=PRUNED_EVERY,
                    move_seconds=PAUSE_STEPS * float(row.sum()) / 8,
                    # What is left of a layer's weights follows its cost here.
                    balanced=row / row.sum() if by_parameters else None,
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
                partition, row, microbatches=MICROBATCHES, min_ranks=2, reference_step_seconds=reference
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
                # A transfer takes a tenth of a stage at full bandwidth; delays are half normal, up to the limit.
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


@functools.cache
def fitted_costs():
    """Products M, and the costs of migrating, that table I's broadcast-reduce fits best (least squares).

    Seconds an epoch = T + c0 (of 1 or of 4) + nu gamma c1 + gamma M nu / (e - nu), where nu of e = 8 GPUs give
    columns away. Returns c0 by nu, c1 and M.
    """
    rows, wanted = [], []
    for nu, (broadcast, _) in TABLE_1.items():
        for gamma, seconds in list(zip(GAMMAS, broadcast, strict=True))[1:]:
            rows.append((nu == 1, nu == 4, nu * gamma, gamma * nu / (GROUP - nu)))
            wanted.append(seconds - broadcast[0])
    (one, four, each, products), *_ = np.linalg.lstsq(
        np.array(rows, dtype=float), np.array(wanted), rcond=None
    )
    return {1: float(one), 4: float(four)}, float(each), float(products)


def migration():
    fixed, each, products = fitted_costs()
    rows = []
    for nu, (broadcast, scatter) in TABLE_1.items():
        for gamma, theirs, other in zip(GAMMAS, broadcast, scatter, strict=True):
            ours = 373 + bool(gamma) * fixed[nu] + nu * gamma * each + gamma * products * nu / (GROUP - nu)
            rows.append({"nu": nu, "gamma": gamma, "published": theirs, "scatter": other, "ours": ours})
    return rows


def late_ranks():
    """Speed-ups over chi with one of 8 late, and how SEMI divides four late ones."""
    fixed, each, products = fitted_costs()
    rest, columns = 373 - products, [1000] * GROUP
    rows = []
    for chi in (1, 2, 4, 6, 8):
        late = rest + products * chi
        times = [late] + [373.0] * (GROUP - 1)
        work = [products * chi] + [products] * (GROUP - 1)
        costs = MoveCosts(communicate=LinearCost(fixed=fixed[1], per_column=each / 1000))
        found = {"chi": chi, "half": late / max(373.0, rest + products * chi / 2)}
        for policy in ("resize", "migrate", "semi"):
            decision = decide_workload(policy, times, work, columns, costs=costs)
            found[policy] = late / semi_seconds(decision, times, work, columns, costs=costs)
        found["migrated"], found["left_out"] = decision.migrated[0] / 1000, decision.pruned[0] / 1000
        rows.append(found)
    chis = (8, 6, 4, 2)
    four = decide_semi(
        [rest + products * chi for chi in chis] + [373.0] * 4,
        [products * chi for chi in chis] + [products] * 4,
        columns,
        costs=MoveCosts(communicate=LinearCost(fixed=fixed[4], per_column=each / 1000)),
    )
    share = products / 373
    return {
        "rows": rows,
        "migrating": sum(count > 0 for count in four.migrated),
        "why": four.why,
        "share": share,
    }


def record():
    parts = (
        six_cases,
        scaling_by_ranks,
        scaling,
        overheads,
        repacking,
        unstable_network,
        migration,
        late_ranks,
    )
    return {part.__name__: part() for part in parts}


def page(found):
    six = [
        (
            row["case"],
            PUBLISHED[row["case"]],
            f"{row['settled']:.2f}",
            f"{row['even']:.2f}",
            f"{row['stays']:.2f} of {row['allowed']:.2f}",
            f"{100 * row['of_the_best']:.1f} %",
            row["moves"],
            f"{100 * row['overhead']:.2f} %",
        )
        for row in found["six_cases"]
    ]
    ranks = {}
    for row in found["scaling_by_ranks"]:
        ranks.setdefault(row["case"], []).append(f"{row['even']:.2f}, {100 * row['of_the_best']:.1f} %")
    two = [
        (r["layers"], r["gpus"], r["published"], f"{r['ours']:.2f}", percent(r["ours"], r["published"]))
        for r in found["scaling"]
    ]
    one = [
        (
            row["layers"],
            " / ".join(map(str, row["published"])),
            " / ".join(f"{PAUSE_STEPS * each['moves']:.1f}" for each in row["ours"]),
            " / ".join(str(each["moves"]) for each in row["ours"]),
            " / ".join(str(each["decide_ms"]) for each in row["ours"]),
        )
        for row in found["overheads"]
    ]
    packed = [
        (
            row["layers"],
            *(f"{row['per_gpu'][str(r)]:.2f} ({row['throughput'][str(r)]:.2f})" for r in (8, 6, 4, 2)),
            f"{row['mean_gpus']:.1f}",
        )
        for row in found["repacking"]
    ]
    network = [
        (r["layers"], f"{r['slowest']:.0f}", f"{r['exact']:.2f}", f"{r['network']:.2f}")
        for r in found["unstable_network"]
    ]
    moved = [
        (
            r["nu"],
            r["gamma"],
            r["published"],
            f"{r['ours']:.0f}",
            percent(r["ours"], r["published"]),
            r["scatter"],
        )
        for r in found["migration"]
    ]
    late = [
        (
            r["chi"],
            f"{r['resize']:.2f}",
            f"{r['half']:.2f}",
            f"{r['migrate']:.2f}",
            f"{r['semi']:.2f}",
            f"{r['migrated']:.2f}",
            f"{r['left_out']:.2f}",
        )
        for r in found["late_ranks"]["rows"]
    ]
    published = {"chi": "published, chi = 8", "resize": 3.5, "half": 2.1}
    late.append((published["chi"], published["resize"], published["half"], "", "", "", ""))
    return f"""# Published dynamic models and stragglers

Written by `python benchmarks/trainer/published_page.py` from `published_recorded.json`: values that DynMo (its supplement and its
reviews) and SEMI-migration (Wang et al., arXiv 2401.11469) print, beside ours. **Everything here is simulated**: there are no 8 to 720
GPUs here. What real ranks show is in [figures.md](figures.md); how to make the balancer follow your model, in
[trainer.md](trainer.md).

## Six dynamic models on 8 GPUs (reviews)

{table(("case", "published speed-up", "largest stage, even split over best", "ours over the even split", "over the best split that stays", "of the best cut in every step", "moves", "moving"), six)}

The paper prints speed-ups, not loads. So each case is a family of load curves with one parameter, set so that the settled model allows
the published speed-up on 8 stages; the second column against the third is therefore no result. The fourth is lower because the layers
get cheaper during the training, not before it. What the balancer adds is in the others: what it wins over the one partition that is
best for the whole training, of what is to be won, and the part of the speed of a partition chosen anew in every step, without cost
and known in time. Loads change every {CHANGED_EVERY} of {STEPS} steps of about 0.1 s, are known {MEASURED_STEPS} steps later, and a move takes
{1000 * PAUSE_SECONDS:.0f} ms.

The same on other numbers of ranks (speed-up over the even split, part of the best cut in every step), 6 layers a rank:

{table(("case", "4 ranks", "8 ranks", "16 ranks"), [(case, *values) for case, values in ranks.items()])}

## Scaling (supplement, table 2): gradual pruning to 90 %

{table(("layers", "GPUs", "published", "ours", "deviation"), two)}

One number, how uneven the weights of the layers are, is set by the row of 24 layers on 8 GPUs; all others follow. The paper's speed-up grows
with the number of layers at the same number of GPUs; ours hardly does, since the shape over the depth is the same for every number of
layers. Runs that were out of memory are left out.

## Overhead (supplement, table 1)

{table(("layers", "published, iterations of 10,000", "ours, iterations", "moves", "a decision, CPU ms"), one)}

In each column: partition by time, by parameters, diffusion by time, by parameters. Ours: moves times the half step that a move takes
(60 ms of 120 on four real ranks), decisions beside it; the reviews give "single digit percent", 10,000 iterations make the published
values 0.04 to 0.6 %. Ours are lower because nothing moves where the predicted gain does not pay for it; they
are alike since what is left of a layer's parameters follows its cost here, and diffusion ends at the same cuts.

## Repacking (supplement, figure 4)

{table(("layers", "8 GPUs", "6", "4", "2", "mean GPUs"), packed)}

Throughput of a GPU relative to 8 GPUs (throughput of the job in parentheses), of the pruned model; the mean over the training of the
fewest GPUs that keep the pace of the dense model (`repack.maxSlowdown: 0.1`). The figure prints no numbers: in it, throughput of a GPU
rises as GPUs are released, as here, where the bubble gets smaller. The reviews put the gain of repacking at 4 to 11 % of the whole.

## Unstable network (supplement, figure 3): 90 pipelines of 8 GPUs

{table(("layers", "links up to ... times slower", "speed-up of `exact` over the even split", "of `network`"), network)}

Each link of each pipeline is slower by a half-normal delay up to the limit, and a step waits for the slowest of the 90 pipelines; a
transfer takes a tenth of a stage's time at full bandwidth. The figure prints no numbers. The paper finds that the speed-up grows with
the delays; here links count for every partition, so the gain of balancing by time alone shrinks, and the network-aware balancer keeps
more of it.

## Migration of columns (SEMI, table I): seconds an epoch

{table(("GPUs that give columns", "gamma", "published, broadcast-reduce", "our cost model", "deviation", "published, scatter-gather"), moved)}

The model of `planning.tensor_parallel` (fixed and per-column cost of sending, helpers that share the columns) with its four
numbers (the fixed part for one and for four GPUs, a column's part, the products' seconds) fitted to the eight values of
broadcast-reduce at gamma above 0; the other migration, scatter-gather, is not implemented.

## Stragglers (SEMI, section V): one of 8 GPUs late

{table(("chi", "ZERO, to the mean (Pri)", "ZERO, half of the columns (PriDiffE)", "migration", "SEMI", "migrated", "left out"), late)}

With the costs fitted above, by which products are {100 * found["late_ranks"]["share"]:.0f} % of a step: no policy is run here. What the late
GPU leaves out costs accuracy; SEMI takes the split with the shortest step, and of those within 1 % the one that loses least. Accuracy is trained for in [figures.md](figures.md): at chi = 8 the paper loses 1.3 %
(Pri) and 0.3 % (PriDiffE).

Four of 8 GPUs late by 8, 6, 4 and 2: the paper's sweet spot is 3 that migrate; ours, by its costs: {found["late_ranks"]["migrating"]}
({found["late_ranks"]["why"]}).
"""


@click.command(help=__doc__)
@click.option("--measure", "anew", is_flag=True, help="Play everything anew, and record it.")
def main(anew):
    if anew:
        RECORDED.write_text(json.dumps(record(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RECORDED.read_text())))
    click.echo(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
