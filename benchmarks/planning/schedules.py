"""Schedules side by side in the simulator: bubble against formula, memory, and the closed form's error.

    python benchmarks/planning/schedules.py [--output json]

Nothing is run: all times are simulated, except the last table (how long the simulator itself takes).
Asserts: GPipe, 1F1B and interleaved 1F1B have the bubble (p - 1) / (v m) to 1e-12.
"""

import json
import time

import click
import numpy as np
from ballast_lab.changing_loads import LOADS
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.schedules.builders.synchronous import one_forward_one_backward
from ballast_policies.planning.schedules.costs import StageCosts, even_costs
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule, stages_of
from ballast_policies.planning.schedules.simulate import simulate
from ballast_policies.planning.schedules.validate import validate
from ballast_policies.planning.step_time import predict_step_seconds

EXACT = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}


def bubbles(ranks, microbatches):
    rows = []
    for name in SCHEDULES:
        schedule = build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=2)
        each = stages_of(name, ranks, 2) // ranks
        costs = even_costs(schedule.stages, forward=1 / each, backward=2 / each, backward_input=1 / each)
        idle = simulate(schedule, costs).makespan / (3 * microbatches) - 1
        facts = validate(schedule)
        formula = (ranks - 1) / (EXACT[name] * microbatches) if name in EXACT else None
        assert formula is None or abs(idle - formula) <= 1e-12, (name, idle, formula)
        rows.append(
            {
                "schedule": name,
                "stagesPerRank": each,
                "bubble": idle,
                "formula": formula,
                # In units of one rank's layers, so that schedules with more stages a rank compare.
                "inFlight": max(facts.in_flight) / each,
                "weightVersions": max(facts.versions_held),
                "transfers": facts.transfers,
            }
        )
    return rows


def closed_form_errors(ranks, microbatches):
    """AMP's formula against the simulated 1F1B, forward and backward apart, for uneven stages."""
    rows = []
    for kind, generate in LOADS.items():
        errors = []
        for seed in range(10):
            seconds = generate(32, 1.0, np.random.default_rng(seed))
            for partition in (even_partition(32, ranks), exact_partition(seconds, ranks)):
                loads = partition.loads(seconds)
                costs = StageCosts(forward=tuple(loads / 3), backward=tuple(loads * 2 / 3))
                simulated = simulate(one_forward_one_backward(ranks, microbatches), costs).makespan
                errors.append(predict_step_seconds(loads * microbatches, microbatches) / simulated - 1)
        rows.append({"kind": kind, "mean": float(np.mean(errors)), "worst": float(max(errors, key=abs))})
    return rows


def simulator_speed():
    rows = []
    for ranks, microbatches in ((4, 8), (8, 64), (16, 256)):
        schedule = one_forward_one_backward(ranks, microbatches)
        begin = time.perf_counter()
        simulate(schedule, even_costs(ranks))
        spent = time.perf_counter() - begin
        rows.append({"ranks": ranks, "microbatches": microbatches, "actions": 2 * ranks * microbatches})
        rows[-1]["milliseconds"] = 1e3 * spent
    return rows


@click.command()
@click.option("--ranks", default=4, show_default=True)
@click.option("--microbatches", default=16, show_default=True)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def main(ranks, microbatches, output):
    tables = {
        "bubbles": bubbles(ranks, microbatches),
        "closedFormErrors": closed_form_errors(ranks, microbatches),
        "simulator": simulator_speed(),
    }
    if output == "json":
        click.echo(json.dumps(tables))
        return
    for title, rows in tables.items():
        click.echo(f"{title} (p = {ranks}, m = {microbatches})" if title != "simulator" else title)
        click.echo(" ".join(f"{name:>21}" for name in rows[0]))
        for row in rows:
            cells = (
                f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()
            )
            click.echo(" ".join(f"{cell:>21}" for cell in cells))
        click.echo()


if __name__ == "__main__":
    main()
