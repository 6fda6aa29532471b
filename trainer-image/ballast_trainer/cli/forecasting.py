"""Options of ``simulate`` and ``trace``, and the profile they start from."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.job.parallelism import ParallelismConfig
from ballast_policies.planning.profile import ProfiledLayer, read_profile

from ballast_trainer.cli.config_file import read_config
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.forecast import Machines

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForecastInput:
    """What both commands are given, by their options."""

    config_path: Path
    assignments: tuple[str, ...] = ()
    profile_path: Path | None = None
    ranks: int | None = None
    at_step: int = 0
    bandwidth: float | None = None
    speeds: tuple[float, ...] = ()
    action_seconds: float = 0.0

    def config(self) -> dict[str, Any]:
        """The configuration of the file, with the fields that are set.

        Raises:
            ConfigurationError: it cannot be read.
        """
        return read_config(self.config_path, self.assignments)

    @property
    def machines(self) -> Machines:
        """What the ranks run on."""
        return Machines(speeds=self.speeds, bandwidth=self.bandwidth, action_seconds=self.action_seconds)

    def layers(
        self, config: dict[str, Any], *, microbatches: int, parallelism: ParallelismConfig | None = None
    ) -> tuple[ProfiledLayer, ...]:
        """The layers of the profile in the file, or of one that is measured now.

        Args:
            config: of the job.
            microbatches: of a step, which a report's seconds are of.
            parallelism: what replicas share; None: nothing. A report has the bytes of the job that ran.

        Raises:
            ConfigurationError: the file is no profile, or a field cannot work.
        """
        path, of = self.profile_path, parallelism or ParallelismConfig()

        def shared(layer: ProfiledLayer) -> ProfiledLayer:
            return layer.shared_by(
                of.optimizer_shares, gradients=of.gradient_shares, weights=of.weight_shares
            )

        if path is None:
            from ballast_trainer.layer_profiler import layer_rows

            profile = read_profile(layer_rows(config, steps=4, at_step=self.at_step))
            return tuple(map(shared, profile.each_layer(microbatches)))
        try:
            profile = read_profile(parse_json(path.read_text()))
            rows = profile.each_layer(microbatches)
            return tuple(map(shared, rows)) if profile.layers else rows
        except (OSError, ValueError) as error:
            reason = (
                f"{path} is not a profile: {error}. "
                "To fix: give what 'ballast-train profile --output json' prints"
            )
            raise ConfigurationError("--profile", reason) from error

    def ranks_of(self, config: Any, layers: int) -> int:
        """How many ranks to forecast for."""
        if self.ranks is not None:
            return self.ranks
        if config.pipeline.replicas:
            return sum(config.pipeline.replicas)
        return config.pipeline.max_stages or min(_USUAL_RANKS, layers)


def forecast_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of both commands, which take them as one :class:`ForecastInput`."""
    own = [field.name for field in dataclasses.fields(ForecastInput)]

    @functools.wraps(command)
    def with_input(**given: Any) -> Any:
        return command(ForecastInput(**{name: given.pop(name) for name in own}), **given)

    found: Callable[..., Any] = with_input
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
        found = option(found)
    return found
