"""``ballast-train profile``: measures the cost of a job's layers without a pipeline."""

import json
from pathlib import Path

import click

from ballast_trainer.cli.config_file import ASSIGNMENTS, CONFIG, read_config


@click.command()
@CONFIG
@ASSIGNMENTS
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Steps to measure.")
@click.option(
    "--at-step", type=click.IntRange(0), default=0, show_default=True, help="Changes as of this step."
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text")
def profile(config_path: Path, assignments: tuple[str, ...], steps: int, at_step: int, output: str) -> None:
    """Measure seconds and bytes of each layer on this machine.

    For one microbatch, forward and backward.
    """
    from ballast_trainer.layer_profiler import layer_rows

    found = layer_rows(read_config(config_path, assignments), steps=steps, at_step=at_step)
    if output == "json":
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{'layer':>10} {'forward ms':>11} {'backward ms':>12} {'optimizer ms':>13} "
        f"{'held MB':>8} {'kept MB':>8}"
    )
    for row in found["layers"]:
        click.echo(
            f"{row['name']:>10} {row['forwardSeconds'] * 1e3:11.3f} {row['backwardSeconds'] * 1e3:12.3f} "
            f"{row['optimizerSeconds'] * 1e3:13.3f} {row['heldBytes'] / 1e6:8.2f} "
            f"{row['activationBytes'] / 1e6:8.2f}"
        )
