"""Losses of a small GPT with PipeDream-2BW's late updates over those without (figure 3.5, table 3.1).

    python benchmarks/trainer/two_versions.py

The trainer in one process, with the pipeline's curve, and Adam: every update of PipeDream-2BW takes the
gradient at the weights before the last update.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from ballast_lab.comparison import Comparison, Point

STEPS = 600


def losses(schedule):
    """Losses by step, of a GPT of four layers on the built-in text."""
    config = {
        "totalSteps": STEPS,
        "model": {
            "name": "gpt",
            "layers": 4,
            "args": {"dim": 48, "heads": 4, "context": 16, "dropout": 0.0},
        },
        "pipeline": {"schedule": schedule, "microbatches": 4, "globalBatchSize": 8},
        "training": {"learningRate": 1e-3},
        "rebalance": {"enabled": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(config))
        command = [str(Path(sys.executable).with_name("ballast-train")), "run", "--config", str(file)]
        done = subprocess.run(
            [*command, "--single-process", "--log", "json"], capture_output=True, check=False
        )
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-500:])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    return [line["loss"] for line in lines if "step_seconds" in line]


def comparison():
    """Loss of 2BW at the end, and the lateness of its updates at the beginning."""
    vanilla, delayed = losses("1F1B"), losses("PipeDream2BW")
    last = [statistics.mean(each[-150:]) for each in (vanilla, delayed)]
    apart = [abs(a - b) / a for a, b in zip(vanilla, delayed, strict=True)]
    return Comparison(
        (
            Point(
                "loss of 2BW over vanilla, last quarter",
                "1.005 (perplexity 19.28, 19.56)",
                last[1] / last[0],
                low=0.98,
                high=1.02,
            ),
            Point(
                "the first quarter is further apart than the last, times",
                "more",
                statistics.mean(apart[:150]) / statistics.mean(apart[-150:]),
                low=1.0,
                high=1e3,
            ),
            Point(
                "last loss of vanilla over its first", "it learns", last[0] / vanilla[0], low=0.0, high=0.6
            ),
        )
    )


@click.command(help=__doc__)
def main():
    click.echo(comparison())


if __name__ == "__main__":
    main()
