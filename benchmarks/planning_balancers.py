"""How good and how fast the balancers are: 300 random cases, ratios to the exact partition.

    python benchmarks/planning_balancers.py [--cases 300] [--output json]

Cases: 24 to 56 layers on 2, 4 or 8 ranks; a third each of pruned (random), frozen-prefix and
early-exit loads, as in the tests.  Seconds are of this machine; the ratios are what counts.
Asserts: diffusion mean <= 1.01, worst <= 1.10.
"""

import json
import time
from functools import partial

import click
import numpy as np
from ballast_policies.planning import decide_rebalance, diffuse, even_partition, exact_partition, repack
from ballast_policies.planning.balancers import deepspeed_partition, nearest_partition


def make_case(random, kind):
    layers, ranks = int(random.integers(24, 57)), int(random.choice([2, 4, 8]))
    if kind == 0:
        return random.uniform(0.1, 1.0, layers), ranks
    if kind == 1:
        return np.where(np.arange(layers) < random.integers(1, layers), 1 / 3, 1.0), ranks
    return np.maximum(0.05, 1.0 - np.arange(layers) / layers * random.uniform(0.3, 1.0)), ranks


def balanced(seconds, ranks):
    start = even_partition(len(seconds), ranks)
    return {
        "even": lambda: start,
        "exact": lambda: exact_partition(seconds, ranks),
        "nearest": lambda: nearest_partition(start, seconds),
        "diffusion": lambda: (start, *diffuse(start, seconds))[-1],
        "deepspeed": lambda: deepspeed_partition(seconds, ranks),
    }


def quality(cases):
    random = np.random.default_rng(0)
    ratios, spent, steps = {}, {}, []
    for case in range(cases):
        seconds, ranks = make_case(random, case % 3)
        best = exact_partition(seconds, ranks).loads(seconds).max()
        steps.append(len(diffuse(even_partition(len(seconds), ranks), seconds)))
        for name, run in balanced(seconds, ranks).items():
            begin = time.perf_counter()
            partition = run()
            spent.setdefault(name, []).append(time.perf_counter() - begin)
            ratios.setdefault(name, []).append(float(partition.loads(seconds).max() / best))
    rows = [
        {
            "balancer": name,
            "mean": float(np.mean(values)),
            "p95": float(np.percentile(values, 95)),
            "worst": float(np.max(values)),
            "medianMs": 1e3 * float(np.median(spent[name])),
        }
        for name, values in ratios.items()
    ]
    return rows, {"mean": float(np.mean(steps)), "most": max(steps)}


def speed():
    """Milliseconds at sizes beyond today's models."""
    random, rows = np.random.default_rng(1), []
    for layers, ranks in ((50, 4), (100, 8), (200, 16)):
        seconds = random.uniform(0.1, 1.0, layers)
        start = even_partition(layers, ranks)
        settings = {"microbatches": 8, "min_gain": 0.05, "horizon_steps": 100}
        jobs = {
            "exact": partial(exact_partition, seconds, ranks),
            "diffusion": partial(diffuse, start, seconds),
            "decideRebalance": partial(decide_rebalance, start, seconds, **settings),
            "repack": partial(repack, start, seconds, microbatches=8, max_slowdown=0.1),
        }
        row = {"layers": layers, "ranks": ranks}
        for name, run in jobs.items():
            begin = time.perf_counter()
            run()
            row[name] = 1e3 * (time.perf_counter() - begin)
        rows.append(row)
    return rows


@click.command()
@click.option("--cases", default=300, show_default=True)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def main(cases, output):
    rows, steps = quality(cases)
    times = speed()
    if output == "json":
        click.echo(json.dumps({"quality": rows, "diffusionSteps": steps, "milliseconds": times}))
    else:
        click.echo(
            f"largest load / exact, {cases} cases\n{'':<10} {'mean':>7} {'p95':>7} {'worst':>7} {'ms':>7}"
        )
        for row in rows:
            click.echo(
                f"{row['balancer']:<10} {row['mean']:>7.4f} {row['p95']:>7.4f} {row['worst']:>7.4f} "
                f"{row['medianMs']:>7.2f}"
            )
        click.echo(f"diffusion: {steps['mean']:.1f} chain moves in the mean, {steps['most']} at most\n")
        click.echo("milliseconds\n" + " ".join(f"{name:>15}" for name in times[0]))
        for row in times:
            click.echo(" ".join(f"{value:>15.4g}" for value in row.values()))
    diffusion = next(row for row in rows if row["balancer"] == "diffusion")
    assert diffusion["mean"] <= 1.01 and diffusion["worst"] <= 1.10, diffusion


if __name__ == "__main__":
    main()
