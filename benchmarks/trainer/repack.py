"""Repacking 8 ranks to 6, to 4, to 2 while they train: the curve, and each GPU's throughput.

Curve: a small GPT with dropout really computes, once repacked three times by plans, once left alone
on its eight ranks; the largest difference between the two curves is printed.

Throughput: layers sleep (``calibrated.py``). From what the trainer measured on eight ranks the
simulator predicts the steps of six, four and two; samples a second and rank are printed relative to
those of eight ranks, predicted beside measured (median steps). They rise, since fewer ranks have a
smaller bubble; the job itself gets slower unless its layers got cheaper.

    python benchmarks/trainer/repack.py [--steps 12]

The targets: 1e-5, and 5 %.
"""

import json
import statistics

import calibrated
import click
import numpy as np
from ballast_lab.simulated_steps import fitted_action_seconds, simulated_step_seconds
from ballast_policies.planning.partition import even_partition

LAYERS = 24
MICROBATCHES = 16
RANKS = (8, 6, 4, 2)
GPT = {"name": "gpt", "layers": 10, "args": {"dim": 32, "heads": 2, "context": 16, "dropout": 0.1}}


def replans(layers, every):
    return tuple(
        (every * (number + 1), ranks, even_partition(layers, ranks).bounds)
        for number, ranks in enumerate(RANKS[1:])
    )


def curve(steps):
    """Largest loss difference between the repacked run and the one left alone, and the repacks."""
    job = {
        "loads": np.zeros((steps, GPT["layers"], 2)),
        "model": GPT,
        "ranks": RANKS[0],
        "bounds": even_partition(GPT["layers"], RANKS[0]).bounds,
        "microbatches": 8,
    }
    alone = calibrated.run(calibrated.Job(**job))
    repacked = calibrated.run(calibrated.Job(**job, replans=replans(GPT["layers"], steps // 6)))
    losses = [
        {line["step"]: line["loss"] for line in ran.lines if "event" not in line} for ran in (alone, repacked)
    ]
    events = [(e["step"], e["ranks_before"], e["ranks_after"]) for e in repacked.events("repack")]
    assert sorted(losses[0]) == sorted(losses[1]) == list(range(1, steps + 1))
    return max(abs(losses[0][step] - losses[1][step]) for step in losses[0]), events, losses[0]


def throughput(steps):
    """Predicted and measured seconds of a step by ranks, and samples per rank relative to eight ranks."""
    loads = np.empty((4 * steps, LAYERS, 2))
    loads[:, :, 0], loads[:, :, 1] = 0.004, 0.008
    ran = calibrated.run(
        calibrated.Job(
            loads=loads,
            ranks=RANKS[0],
            bounds=even_partition(LAYERS, RANKS[0]).bounds,
            microbatches=MICROBATCHES,
            replans=replans(LAYERS, steps),
        )
    )
    found: dict[int, list[float]] = {}
    for line in ran.lines:
        if "event" not in line:
            ranks = len(line["stages"])
            found.setdefault(ranks, []).append(line["step_seconds"])
    measured = {ranks: statistics.median(seconds[1:]) for ranks, seconds in found.items()}

    def predict(ranks, action):
        split = even_partition(LAYERS, ranks)
        layers = simulated_step_seconds(
            split.loads(ran.costs.forward),
            split.loads(ran.costs.backward),
            MICROBATCHES,
            action_seconds=action,
        )
        return layers + float(split.loads(ran.costs.optimizer).max())

    action = fitted_action_seconds(measured[RANKS[0]], lambda each: predict(RANKS[0], each))
    rows = {}
    for ranks in RANKS:
        predicted = predict(ranks, action)
        each = [RANKS[0] * measured[RANKS[0]] / (ranks * seconds) for seconds in (predicted, measured[ranks])]
        rows[ranks] = {
            "predicted_step_seconds": round(float(predicted), 4),
            "measured_step_seconds": round(measured[ranks], 4),
            "predicted_throughput_per_rank": round(float(each[0]), 3),
            "measured_throughput_per_rank": round(each[1], 3),
            "error_percent": round(float(100 * (each[0] / each[1] - 1)), 2),
        }
    return rows, [event["pause_ms"] for event in ran.events("repack")]


@click.command(help=__doc__)
@click.option("--steps", default=12, show_default=True, help="Of each number of ranks, at least.")
def main(steps):
    difference, events, losses = curve(240)
    rows, pauses = throughput(steps)
    click.echo(
        json.dumps(
            {
                "benchmark": "trainer_repack",
                "curve": {
                    "repacks": events,
                    "largest_loss_difference": difference,
                    "loss": [round(losses[1], 4), round(losses[len(losses)], 4)],
                    "target": 1e-5,
                },
                "throughput": {"layers": calibrated.SAYS, "by_ranks": rows, "target_percent": 5},
                "pause_ms": [round(pause, 1) for pause in pauses],
            }
        )
    )


if __name__ == "__main__":
    main()
