"""``ballast-train simulate`` and ``trace``: steps, memory and schedule of a job, without running it."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.limits import FILE
from ballast_policies.planning.profile import ProfiledLayer, read_profile
from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.exports import chrome_trace, schedule_csv, schedule_svg, timeline
from ballast_policies.planning.schedules.simulate import simulate as simulate_schedule

from ballast_trainer.cli.config_file import ASSIGNMENTS, CONFIG, read_config
from ballast_trainer.config import read_job_config
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.forecast import Forecast, Machines, forecasts, schedule_for
from ballast_trainer.replay import Replay, read_loads, replay

_PATH = click.Path(path_type=Path)
_USUAL_STAGES = 4
_MEASURED = ("profile_path", "at_step", "bandwidth", "speeds", "action_seconds")


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


def _finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """The number of an option, whose range lets NaN through."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForecastInput:
    """Input of both commands, by their options."""

    config_path: Path
    assignments: tuple[str, ...] = ()
    profile_path: Path | None = None
    ranks: int | None = None
    at_step: int = 0
    bandwidth: float | None = None
    speeds: tuple[float, ...] = ()
    action_seconds: float = 0.0

    @property
    def machines(self) -> Machines:
        """Machines that the ranks run on."""
        return Machines(speeds=self.speeds, bandwidth=self.bandwidth, action_seconds=self.action_seconds)

    def refuse(self, why: str, *names: str) -> None:
        """Refuse those of the options that are given, since they would not be read.

        Raises:
            UsageError: there is one.
        """
        for name in names:
            if getattr(self, name):
                option = name.removesuffix("_path").replace("_", "-")
                raise click.UsageError(f"--{option}: {why}. To fix: leave one of the two out")

    def layers(self, value: dict[str, Any], config: JobConfig) -> tuple[ProfiledLayer, ...]:
        """The layers of the profile in the file, or of one that is measured now.

        A report has the bytes of the job that ran, and the seconds of a step, of so many microbatches.

        Raises:
            ConfigurationError: the file is no profile, or a field cannot work.
        """
        path, of, microbatches = self.profile_path, config.parallelism, config.pipeline.microbatches
        if path is not None:
            self.refuse("--profile was measured before", "at_step")

        def shared(layer: ProfiledLayer) -> ProfiledLayer:
            return layer.shared_by(
                of.optimizer_shares,
                gradients=of.gradient_shares,
                weights=of.weight_shares,
                experts=of.data,
            )

        if path is None:
            from ballast_trainer.layer_profiler import layer_rows

            profile = read_profile(layer_rows(value, steps=4, at_step=self.at_step))
            return tuple(map(shared, profile.each_layer(microbatches)))
        try:
            profile = read_profile(parse_json(FILE.read(path)))
            rows = profile.each_layer(
                microbatches // of.data
            )  # of a report, each replica's share of the step
            if profile.layers and profile.tensor != of.tensor:
                raise ConfigurationError(
                    "--profile",
                    f"{path} was measured at parallelism.tensor {profile.tensor}, the job has {of.tensor}. "
                    "To fix: leave it out, or give what 'ballast-train profile' prints of this job",
                )
            if "microbatch_size" in profile.model_fields_set:
                size = config.pipeline.global_batch_size / microbatches
                rows = tuple(row.of_samples(size / profile.microbatch_size) for row in rows)
            return tuple(map(shared, rows)) if profile.layers else rows
        except (OSError, ValueError) as error:
            reason = (
                f"{path} is not a profile: {error}. "
                "To fix: give what 'ballast-train profile --output json' prints"
            )
            raise ConfigurationError("--profile", reason) from error

    def ranks_of(self, config: JobConfig, layers: int) -> int:
        """Number of ranks of the forecast."""
        if self.ranks is not None:
            return self.ranks
        pipeline = config.pipeline
        positions = sum(pipeline.replicas) or pipeline.max_stages or min(_USUAL_STAGES, layers)
        return positions * Mesh.of(config).column


def forecast_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of both commands, which take them as one :class:`ForecastInput`."""
    own = [field.name for field in dataclasses.fields(ForecastInput)]

    @functools.wraps(command)
    def with_input(**given: Any) -> Any:
        return command(ForecastInput(**{name: given.pop(name) for name in own}), **given)

    found: Callable[..., Any] = with_input
    for option in reversed(
        [
            CONFIG,
            ASSIGNMENTS,
            click.option(
                "--profile",
                "profile_path",
                type=_PATH,
                help="What 'ballast-train profile --output json' printed; default: measure now.",
            ),
            click.option(
                "--ranks",
                type=click.IntRange(1),
                help="Default: all of pipeline.replicas, pipeline.maxStages, or 4 stages.",
            ),
            click.option(
                "--at-step", type=click.IntRange(0), default=0, help="Measure with changes as of it."
            ),
            click.option(
                "--bandwidth",
                type=click.FloatRange(0, min_open=True),
                callback=_finite,
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
                callback=_finite,
                default=0.0,
                help="What each forward and each backward takes besides its layers.",
            ),
        ]
    ):
        found = option(found)
    return found


def _text(found: Forecast) -> str:
    formula = f", {found.formula_seconds * 1e3:.1f} ms by AMP's formula" if found.formula_seconds else ""
    lines = [
        f"{found.name}: {found.schedule}, a step takes {found.step_seconds * 1e3:.1f} ms{formula}",
        f"  idle {found.bubble.idle:.1%} = schedule {found.bubble.inherent:.1%} + imbalance "
        f"{found.bubble.dynamic:.1%}; busiest rank {found.imbalance:.1%} over the mean",
        f"  {'rank':>4} {'layers':>14} {'busy ms':>8} {'in flight':>9} {'versions':>8} {'held MB':>8} "
        f"{'kept MB':>8} {'all MB':>8}",
    ]
    for rank in found.ranks:
        layers = " ".join(f"{first}-{last - 1}" for first, last in rank.layers)
        lines.append(
            f"  {rank.rank:>4} {layers:>14} {rank.busy_seconds * 1e3:8.1f} {rank.in_flight:9} "
            f"{rank.weight_versions:8} {rank.held_bytes / 1e6:8.1f} {rank.activation_bytes / 1e6:8.1f} "
            f"{rank.bytes / 1e6:8.1f}"
        )
    host = max(rank.host_bytes for rank in found.ranks)
    if host:
        lines.append(f"  copies for checkpoints take up to {host / 1e6:.1f} MB of the host's memory a rank")
    return "\n".join(lines)


def _replay_text(found: Replay, ranks: int) -> str:
    gain = found.static_seconds / found.followed_seconds
    most = found.static_seconds / found.best_seconds
    return (
        f"{found.looks} looks, {len(found.moves)} moves over {ranks} ranks: a step takes "
        f"{found.followed_seconds * 1e3:.1f} ms, {found.static_seconds * 1e3:.1f} ms with the best cut that "
        f"stays, {found.best_seconds * 1e3:.1f} ms with the best at each look: {gain:.3f} of at most "
        f"{most:.3f} times as fast"
    )


@click.command()
@forecast_options
@click.option(
    "--loads",
    "loads_path",
    type=_PATH,
    help="Replay the load curve that 'run --log json' printed: moves, and what following it wins.",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def simulate(given: ForecastInput, loads_path: Path | None, output: str) -> None:
    """Predict step time, bubble and memory without starting ranks.

    Each rank is taken to be alone on its device, which is as fast as the one that was profiled unless
    --speeds says how fast.
    """
    value = read_config(given.config_path, given.assignments)
    config = read_job_config(value)
    if loads_path is not None:
        given.refuse("--loads has the seconds of ranks that are alike", *_MEASURED)
        looks = read_loads(loads_path)
        count = given.ranks_of(config, len(looks[0].seconds))
        replayed = replay(config, looks, ranks=count)
        text = _replay_text(replayed, count)
        if output == "json":
            text = json.dumps({"ranks": count, "replay": replayed.as_json()})
        click.echo(text)
        return
    rows = given.layers(value, config)
    count = given.ranks_of(config, len(rows))
    found = forecasts(config, rows, ranks=count, machines=given.machines)
    if output == "json":
        click.echo(json.dumps({"ranks": count, "forecasts": [one.as_json() for one in found]}))
    else:
        click.echo("\n".join(_text(one) for one in found))


FORMATS = (".json", ".svg", ".txt", ".csv")
_FLOW_STEPS = 2


@click.command()
@forecast_options
@click.option(
    "--even", is_flag=True, help="All stages alike, backwards twice as long as forwards: nothing is measured."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write here: .json for chrome://tracing or Perfetto, .svg, .txt, or .csv as torch reads it. "
    "Default: text to standard output.",
)
def trace(given: ForecastInput, even: bool, out: Path | None) -> None:
    """Show every action of a simulated step in time.

    The partition is the job's first one; two steps where the schedule has no flush.
    """
    if out is not None and out.suffix not in FORMATS:
        raise ConfigurationError(
            "--out", f"{out} must end in one of {', '.join(FORMATS)}. To fix: e.g. step.json"
        )
    if out is not None and not out.parent.is_dir():
        raise ConfigurationError("--out", f"no folder {out.parent}. To fix: make it, or write elsewhere")
    value = read_config(given.config_path, given.assignments)
    config = read_job_config(value)
    if even:
        given.refuse("--even measures nothing, and takes all stages and ranks alike", *_MEASURED)
        schedule = schedule_for(config, given.ranks_of(config, 4), steps=_FLOW_STEPS)
        played = simulate_schedule(schedule, even_costs(schedule.stages))
    else:
        rows = given.layers(value, config)
        count = given.ranks_of(config, len(rows))
        (found, *_) = forecasts(config, rows, ranks=count, machines=given.machines, steps=_FLOW_STEPS)
        played = found.trace
    text = {
        ".json": lambda: chrome_trace(played),
        ".svg": lambda: schedule_svg(played),
        ".csv": lambda: schedule_csv(played.schedule),
    }.get(out.suffix if out is not None else "", lambda: timeline(played) + "\n")()
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text)
        click.echo(f"{out}: {played.schedule.name}, {played.makespan * 1e3:.1f} ms, simulated")
