"""Options of ``simulate`` and ``trace``, and the profile they start from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ballast_trainer.errors import ConfigurationError

FILE = click.Path(path_type=Path)
_USUAL_RANKS = 4


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
        ]
    ):
        command = option(command)
    return command


def profile_of(config: dict[str, Any], path: Path | None, *, at_step: int) -> dict[str, Any]:
    """The profile in a file, or one that is measured now.

    Raises:
        ConfigurationError: the file cannot be read, or a field cannot work.
    """
    if path is None:
        from ballast_trainer.layer_profiler import layer_rows

        return layer_rows(config, steps=4, at_step=at_step)
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = (
            f"cannot read {path}: {error}. To fix: give what 'ballast-train profile --output json' prints"
        )
        raise ConfigurationError("--profile", reason) from error
    return found


def ranks_of(config: Any, given: int | None, layers: int) -> int:
    """How many ranks to forecast for."""
    if given is not None:
        return given
    if config.pipeline.replicas:
        return sum(config.pipeline.replicas)
    return config.pipeline.max_stages or min(_USUAL_RANKS, layers)
