"""Quality and speed of the balancers: 300 random cases, ratios to the exact partition.

    python benchmarks/planning/balancers.py [--cases 300] [--output json]

Cases: 24 to 56 layers on 2, 4 or 8 ranks; a third each of pruned (random), frozen-prefix and
early-exit loads, as in the tests.  Seconds are of this machine; the ratios are what counts.
Largest load over that of the exact partition: of the even split (what by parameters gives where all layers
have as many), diffusion, DeepSpeed's rule by time, and both by parameters where those differ from layer to
layer (0.5 to 2) and from time.  Over links: the simulated 1F1B step of the network-aware partition over
that of the exact one, where each link takes 5 % of a stage's time and one of three four times that (DynMo's
delays of 4x).
Asserts: exact is never beaten (brute force, up to 12 layers), diffusion mean <= 1.01, worst <= 1.10.
"""

import itertools
import json
import time
from functools import partial

import click
import numpy as np
from ballast_lab.simulated_steps import simulated_step_seconds
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.fewest_moves import nearest_partition
from ballast_policies.planning.balancers.network import network_aware_partition
from ballast_policies.planning.balancers.registry import BalancerInput, deepspeed_partition
from ballast_policies.planning.diffusion import diffuse
from ballast_policies.planning.partition import Partition, even_partition
from ballast_policies.planning.rebalance import decide_rebalance
from ballast_policies.planning.repack import RankSubsets, repack


def make_case(random, kind):
    layers, ranks = int(random.integers(24, 57)), int(random.choice([2, 4, 8]))
    if kind == 0:
        return random.uniform(0.1, 1.0, layers), ranks
    if kind == 1:
        return np.where(np.arange(layers) < random.integers(1, layers), 1 / 3, 1.0), ranks
    return np.maximum(0.05, 1.0 - np.arange(layers) / layers * random.uniform(0.3, 1.0)), ranks


def balanced(seconds, ranks, parameters):
    start = even_partition(len(seconds), ranks)
    return {
        "even": lambda: start,
        "exact": lambda: exact_partition(seconds, ranks),
        "nearest": lambda: nearest_partition(start, seconds),
        "diffusion": lambda: (start, *diffuse(start, seconds))[-1],
        "deepspeed": lambda: deepspeed_partition(seconds, ranks),
        "exact by parameters": lambda: exact_partition(parameters, ranks),
        "diffusion by parameters": lambda: (start, *diffuse(start, parameters))[-1],
        "deepspeed by parameters": lambda: deepspeed_partition(parameters, ranks),
    }


def quality(cases):
    random = np.random.default_rng(0)
    ratios, spent, steps = {}, {}, []
    for case in range(cases):
        seconds, ranks = make_case(random, case % 3)
        best = exact_partition(seconds, ranks).loads(seconds).max()
        steps.append(len(diffuse(even_partition(len(seconds), ranks), seconds)))
        parameters = np.random.default_rng(case).uniform(0.5, 2.0, len(seconds))
        for name, run in balanced(seconds, ranks, parameters).items():
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


def brute_force(cases=100):
    """Cases of up to 12 layers in which some contiguous partition beats the exact one: none."""
    random, beaten = np.random.default_rng(2), 0
    for _ in range(cases):
        layers, ranks = int(random.integers(4, 13)), int(random.integers(2, 5))
        seconds = random.uniform(0.1, 1.0, layers)
        best = min(
            Partition(bounds=(0, *cuts, layers)).loads(seconds).max()
            for cuts in itertools.combinations(range(1, layers), ranks - 1)
        )
        beaten += bool(exact_partition(seconds, ranks).loads(seconds).max() > best * (1 + 1e-12))
    return {"cases": cases, "beaten": beaten}


def over_links(cases=60, microbatches=32):
    """Simulated step of the network-aware partition over that of the one that is blind to the links."""
    random, ratios = np.random.default_rng(3), []
    for case in range(cases):
        seconds = random.uniform(0.5, 1.5, 24)
        links = np.full(3, 0.05 * seconds.sum() / 4)
        links[case % 3] *= 4
        steps = []
        for partition in (
            network_aware_partition(seconds, 4, boundary_seconds=[1.0] * 23, link_factors=links),
            exact_partition(seconds, 4),
        ):
            loads = microbatches * partition.loads(seconds)
            steps.append(
                simulated_step_seconds(loads / 3, loads * 2 / 3, microbatches, boundary_seconds=links)
            )
        ratios.append(steps[0] / steps[1])
    return {
        "cases": cases,
        "mean": float(np.mean(ratios)),
        "best": float(min(ratios)),
        "worst": float(max(ratios)),
        "faster": sum(bool(ratio < 1 - 1e-9) for ratio in ratios),
    }


def speed():
    """Milliseconds at sizes beyond today's models."""
    random, rows = np.random.default_rng(1), []
    for layers, ranks in ((50, 4), (100, 8), (200, 16)):
        seconds = random.uniform(0.1, 1.0, layers)
        start = even_partition(layers, ranks)
        asked = BalancerInput(partition=start, seconds=seconds, microbatches=8)
        jobs = {
            "exact": partial(exact_partition, seconds, ranks),
            "diffusion": partial(diffuse, start, seconds),
            "decideRebalance": partial(decide_rebalance, asked, min_gain=0.05, horizon_steps=100),
            "repack": partial(repack, RankSubsets(start, seconds), microbatches=8, max_slowdown=0.1),
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
    optimal, links, times = brute_force(), over_links(), speed()
    if output == "json":
        click.echo(
            json.dumps(
                {
                    "quality": rows,
                    "diffusionSteps": steps,
                    "bruteForce": optimal,
                    "overLinks": links,
                    "milliseconds": times,
                }
            )
        )
    else:
        click.echo(
            f"largest load / exact, {cases} cases\n{'':<24} {'mean':>7} {'p95':>7} {'worst':>7} {'ms':>7}"
        )
        for row in rows:
            click.echo(
                f"{row['balancer']:<24} {row['mean']:>7.4f} {row['p95']:>7.4f} {row['worst']:>7.4f} "
                f"{row['medianMs']:>7.2f}"
            )
        click.echo(f"diffusion: {steps['mean']:.1f} chain moves in the mean, {steps['most']} at most\n")
        click.echo(
            f"exact against brute force: beaten in {optimal['beaten']} of {optimal['cases']} cases\n"
            f"network-aware step / blind step, one of three links slow: mean {links['mean']:.3f}, "
            f"best {links['best']:.3f}, worst {links['worst']:.3f}, faster in {links['faster']} of "
            f"{links['cases']}\n"
        )
        click.echo("milliseconds\n" + " ".join(f"{name:>15}" for name in times[0]))
        for row in times:
            click.echo(" ".join(f"{value:>15.4g}" for value in row.values()))
    assert optimal["beaten"] == 0, optimal
    diffusion = next(row for row in rows if row["balancer"] == "diffusion")
    assert diffusion["mean"] <= 1.01 and diffusion["worst"] <= 1.10, diffusion


if __name__ == "__main__":
    main()
