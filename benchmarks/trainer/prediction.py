"""Step time predicted by the simulator against measured: 20 plans of four ranks.

Layers sleep (``calibrated.py``), unevenly: each forward 6 to 18 ms a microbatch, each backward twice
that. One plan is run first - 1F1B, an even split - and all that a prediction needs is taken from what the
trainer measured there: the layers' seconds, and by ``fitted_action_seconds`` what the runtime needs for
an action besides (bookkeeping, waking up, the network's latency). Then 20 plans are predicted, of other
schedules, partitions and numbers of microbatches, and run; the measured step is the fastest of five,
since other programs on the machine only add time.

    python benchmarks/trainer/prediction.py [--steps 5] [--output json]

The target is 5 % for each plan.
"""

import json
import statistics

import calibrated
import click
import numpy as np
from ballast_policies.planning import fitted_action_seconds
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.schedules import DEFAULT_STAGES_PER_RANK
from ballast_policies.planning.step_time import simulated_step_seconds

RANKS, LAYERS = 4, 16
FOUR = ((0, 4, 8, 12, 16), (0, 3, 9, 11, 16), (0, 6, 9, 13, 16), (0, 1, 6, 10, 16))
EIGHT = ((0, 2, 4, 6, 8, 10, 12, 14, 16), (0, 1, 4, 6, 7, 10, 11, 14, 16), (0, 3, 4, 5, 8, 9, 12, 13, 16))
PLANS = (
    *(("1F1B", m, FOUR[split]) for m, split in ((4, 1), (8, 1), (8, 2), (12, 3), (16, 2))),
    *(("GPipe", m, FOUR[split]) for m, split in ((4, 2), (8, 0), (8, 3), (12, 1))),
    *(("ZeroBubbleH1", m, FOUR[split]) for m, split in ((8, 0), (8, 3), (12, 2))),
    *(("Interleaved1F1B", m, EIGHT[split]) for m, split in ((8, 0), (8, 1), (12, 2))),
    *(("LoopedBFS", m, EIGHT[split]) for m, split in ((4, 1), (8, 2))),
    *(("ZeroBubbleV", m, EIGHT[split]) for m, split in ((8, 0), (8, 1), (12, 2))),
)
"""Schedule, microbatches, bounds of the stages."""


def layer_seconds():
    forward = np.random.default_rng(7).uniform(0.006, 0.018, LAYERS)
    return np.stack([forward, 2 * forward], axis=1)


def predicted(plan, costs, profiled_microbatches, action_seconds):
    schedule, microbatches, bounds = plan
    split, scale = Partition(bounds=bounds), microbatches / profiled_microbatches
    return simulated_step_seconds(
        scale * split.loads(costs.forward),
        scale * split.loads(costs.backward),
        microbatches,
        schedule=schedule,
        chunks=DEFAULT_STAGES_PER_RANK,
        action_seconds=action_seconds,
        fixed_seconds=float(split.loads(costs.optimizer).max()),
    )


def measured(plan, steps):
    schedule, microbatches, bounds = plan
    ran = calibrated.run(
        calibrated.Job(
            loads=np.repeat(layer_seconds()[None], steps, axis=0),
            ranks=RANKS,
            bounds=bounds,
            microbatches=microbatches,
            schedule=schedule,
        )
    )
    return min(ran.step_seconds().values()), ran.costs


@click.command(help=__doc__)
@click.option("--steps", default=5, show_default=True)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def main(steps, output):
    profiled = ("1F1B", 8, FOUR[0])
    seconds, costs = measured(profiled, 2 * steps)
    action = float(fitted_action_seconds(seconds, lambda each: predicted(profiled, costs, 8, each)))
    rows = []
    for plan in PLANS:
        schedule, microbatches, bounds = plan
        guess = float(predicted(plan, costs, 8, action))
        found, _ = measured(plan, steps)
        rows.append(
            {
                "schedule": schedule,
                "microbatches": microbatches,
                "bounds": bounds,
                "predicted_seconds": round(guess, 4),
                "measured_seconds": round(found, 4),
                "without_action_seconds": round(predicted(plan, costs, 8, 0.0), 4),
                "error_percent": round(float(100 * (guess / found - 1)), 2),
            }
        )
        if output == "text":
            click.echo(
                f"{schedule:<16} m={microbatches:<3} {bounds!s:<38} predicted {guess:.3f} s  "
                f"measured {found:.3f} s  {rows[-1]['error_percent']:+.1f} %"
            )
    errors = [abs(row["error_percent"]) for row in rows]
    summary = {
        "benchmark": "trainer_prediction",
        "layers": calibrated.SAYS,
        "plans": len(rows),
        "action_milliseconds": round(1000 * action, 3),
        "mean_error_percent": round(statistics.mean(errors), 2),
        "worst_error_percent": float(max(errors)),
        "within_5_percent": sum(bool(error <= 5) for error in errors),
        "target_percent": 5,
    }
    click.echo(json.dumps({**summary, "rows": rows} if output == "json" else summary))


if __name__ == "__main__":
    main()
