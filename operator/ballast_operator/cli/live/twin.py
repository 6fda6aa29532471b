"""``ballast twin``: what the operator saw, replayed in the simulator; how far the two are apart."""

import datetime
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.option_names import printable

if TYPE_CHECKING:
    from ballast_policies.simulator.replay import Recording, Replay

DAY = 86_400.0


class Moment(click.ParamType[float]):
    """A time as 2026-11-26T08:00Z, in UTC where it names no zone; epoch seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The epoch seconds.

        Raises:
            BadParameter: it is no time.
        """
        try:
            at = datetime.datetime.fromisoformat(str(value))
            return at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time. To fix: as 2026-11-26T08:00Z", param, ctx)


file_option = click.option(
    "--file",
    "path",
    envvar="BALLAST_HISTORY",
    required=True,
    show_envvar=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The operator's history; in its pod it is set.",
)


@click.command()
@file_option
@click.option("--since", type=Moment(), metavar="TIME", help="[default: a day before --until]")
@click.option("--until", type=Moment(), metavar="TIME", help="[default: now]")
@click.option("--keep", is_flag=True, help="Add the result to the history: condition TwinAgrees.")
@click.option("--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
def twin(path: Path, since: float | None, until: float | None, keep: bool, output: str) -> None:
    """Replay the last day in the simulator, by the operator's decisions; how far off is it?

    Compared are the jobs that ended. The operator does the same each day, with --keep.
    In the operator's pod: kubectl exec -n ballast-system deploy/ballast -- ballast twin
    """
    from ballast_operator.history.recording import TwinResult
    from ballast_operator.history.store import HistoryError, write_kept

    found = replayed(recorded(path, since, until))
    result = TwinResult.of(found)
    if keep:
        try:
            write_kept(path, result.as_row())
        except HistoryError as error:
            raise click.ClickException(str(error)) from error
    if output == "text":
        click.echo(_as_text(found, result.text))
        return
    content = {**found.to_json(), "agrees": result.agrees, "within": result.within}
    if output == "yaml":
        import yaml

        click.echo(yaml.safe_dump(content, sort_keys=False), nl=False)
    else:
        click.echo(json.dumps(content, indent=2))


def recorded(path: Path, since: float | None, until: float | None) -> "Recording":
    """What the file has of the time, by default of the last day.

    Raises:
        UsageError: the time ends before it begins.
        ClickException: the file cannot be read.
    """
    from ballast_operator.history.store import HistoryError
    from ballast_operator.history.twin import read_recording

    until = time.time() if until is None else until
    since = until - DAY if since is None else since
    if since >= until:
        raise click.UsageError("--since: it is not before --until. To fix: name an earlier time")
    try:
        return read_recording(path, since, until)
    except HistoryError as error:
        raise click.ClickException(str(error)) from error


def replayed(recording: "Recording", objective: str = "") -> "Replay":
    """The recording played again, by another policy if one is named.

    Raises:
        ClickException: the policy cannot be used on it.
    """
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.simulator.clock import SimulationError
    from ballast_policies.simulator.replay import replay

    try:
        return replay(recording, objective=objective)
    except (ProblemError, SimulationError) as error:
        raise click.ClickException(f"{error}. To fix: choose another time by --since and --until") from error


def _as_text(found: "Replay", said: str) -> str:
    lines = []
    if found.jobs:
        lines.append(f"{'job':40} {'took h':>9} {'replay':>9} {'error':>8} {'cost':>10} {'replay':>10}")
    for job in found.jobs:
        played = "later" if job.seconds is None else f"{job.seconds / 3600:.3f}"
        off = "" if job.seconds is None else f"{job.seconds / job.recorded_seconds - 1:+.1%}"
        lines.append(
            f"{job.job:40} {job.recorded_seconds / 3600:9.3f} {played:>9} {off:>8} "
            f"{job.recorded_cost:10.2f} {job.cost:10.2f}"
        )
    lines += [f"left out: {name}: {why}" for name, why in sorted(found.left_out.items())]
    return printable("\n".join([*lines, f"{said[0].upper()}{said[1:]}."]))
