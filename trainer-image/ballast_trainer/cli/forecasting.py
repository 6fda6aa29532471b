"""Options of ``simulate`` and ``trace``, and the profile they start from."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from ballast_policies.contract.decode import parse_json
from ballast_policies.planning.profile_file import ProfiledLayer, read_profile

from ballast_trainer.errors import ConfigurationError

FILE = click.Path(path_type=Path)
_USUAL_RANKS = 4


def _speeds(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    """The numbers of ``--speeds``."""
    if value is None:
        return ()
    try:
        speeds = tuple(float(part) for part in value.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise click.BadParameter(f"{value} is not a list of numbers above 0. To fix: e.g. 1,1,0.5,0.5")
    return speeds


def forecast_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of both commands."""
    for option in reversed(
        [
            click.option("--config", "config_path", type=FILE, required=True, help="YAML or JSON file."),
            click.option(
                "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Override a field."
            ),
            click.option(
                "--profile",
                "profile_path",
                type=FILE,
                help="What 'ballast-train profile --output json' printed; default: measure now.",
            ),
            click.option(
                "--ranks",
                type=click.IntRange(1),
                help="Default: pipeline.maxStages, else the replicas, else 4.",
            ),
            click.option(
                "--at-step", type=click.IntRange(0), default=0, help="Measure with changes as of it."
            ),
            click.option(
                "--bandwidth",
                type=click.FloatRange(0, min_open=True),
                help="Bytes/s between two ranks; default: transfers are free.",
            ),
            click.option(
                "--speeds",
                callback=_speeds,
                metavar="S,S,...",
                help="Speed of each rank relative to the device that was profiled; default: all 1.",
            ),
            click.option(
                "--action-seconds",
                type=click.FloatRange(0),
                default=0.0,
                help="What each forward and each backward takes besides its layers.",
            ),
        ]
    ):
        command = option(command)
    return command


def profiled_layers(
    config: dict[str, Any], path: Path | None, *, at_step: int, microbatches: int, shares: int = 1
) -> tuple[ProfiledLayer, ...]:
    """The layers of the profile in a file, or of one that is measured now.

    Args:
        config: of the job.
        path: the file, if any.
        at_step: measure with changes as of it.
        microbatches: of a step, which a report's seconds are of.
        shares: replicas that share a layer's optimizer. A report has the bytes of the job that ran.

    Raises:
        ConfigurationError: the file is no profile, or a field cannot work.
    """
    if path is None:
        from ballast_trainer.layer_profiler import layer_rows

        profile = read_profile(layer_rows(config, steps=4, at_step=at_step))
        return tuple(layer.shared_by(shares) for layer in profile.each_layer(microbatches))
    try:
        profile = read_profile(parse_json(path.read_text()))
        rows = profile.each_layer(microbatches)
        return tuple(layer.shared_by(shares) for layer in rows) if profile.layers else rows
    except (OSError, ValueError) as error:
        reason = (
            f"{path} is not a profile: {error}. "
            "To fix: give what 'ballast-train profile --output json' prints"
        )
        raise ConfigurationError("--profile", reason) from error


def ranks_of(config: Any, given: int | None, layers: int) -> int:
    """How many ranks to forecast for."""
    if given is not None:
        return given
    if config.pipeline.replicas:
        return sum(config.pipeline.replicas)
    return config.pipeline.max_stages or min(_USUAL_RANKS, layers)
