"""``ballast history`` and ``ballast twin``: what jobs did, also deleted ones, replayed in the simulator."""

import dataclasses
import datetime
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.jobs import print_objects
from ballast_operator.cli.option_names import Database, printable
from ballast_operator.errors import HistoryError

if TYPE_CHECKING:
    from ballast_policies.simulator.replay import Recording, Replay

    from ballast_operator.history.recording import JobRecord

DAY = 86_400.0


class Moment(click.ParamType[float]):
    """A time as 2026-11-26T08:00Z, in UTC where it names no zone; epoch seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The epoch seconds. Raises BadParameter: it is no time."""
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
    type=Database(),
    help="The operator's --history: a file, or postgresql://...; in its pod it is set.",
)


@click.command()
@click.argument("job", default="")
@click.option("-n", "--namespace", default="", help="Jobs of this namespace; default: all.")
@file_option
@click.option("--last", default=50, show_default=True, type=click.IntRange(1, 100_000), help="So many jobs.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def history(job: str, namespace: str, path: str, last: int, output: str) -> None:
    """List what jobs did, also deleted ones, the newest change first; of JOB, its events, too.

    In the operator's pod: kubectl exec -n ballast-system deploy/ballast -- ballast history
    """
    from ballast_operator.history.store import History

    kept = History(path)
    try:
        found = kept.jobs(namespaces=[namespace] if namespace else None, name=job, most=last)
        events = {each.uid: kept.events(each.uid) for each in found} if job else {}
    except HistoryError as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        rows = [dataclasses.asdict(each) for each in found]
        for row in rows if job else ():
            told = events[row["uid"]]
            row["events"] = [{"at": at, "what": what, "text": text} for at, what, text in told]
        click.echo(json.dumps({"jobs": rows}, indent=2))
        return
    if not found:
        click.echo(f"history has no {'such job' if job or namespace else 'jobs yet'}")
    for each in found:
        click.echo(printable(_line(each)))
        for at, what, text in events.get(each.uid, ()):
            click.echo(printable(f"  {_time(at)} {what}: {text}"))


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _line(job: "JobRecord") -> str:
    gone = f", deleted {_time(job.deleted)}" if job.deleted is not None else ""
    good = f", goodput {job.goodput:.0%}" if job.goodput is not None else ""
    lost = f", {job.lost_steps} steps lost" if job.lost_steps else ""
    message = f"; {job.message}" if job.message else ""
    return (
        f"{job.namespace}/{job.name}: {job.state} {_time(job.updated)}{gone}; step {job.step} of "
        f"{job.total_steps}, {job.launches} launches, {job.gpu_seconds / 3600:.2f} GPU h, "
        f"cost {job.cost:.2f}{good}{lost}{message}"
    )


@click.command()
@file_option
@click.option("--since", type=Moment(), metavar="TIME", help="[default: a day before --until]")
@click.option("--until", type=Moment(), metavar="TIME", help="[default: now]")
@click.option("--keep", is_flag=True, help="Add the result to the history: condition TwinAgrees.")
@click.option("--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
def twin(path: str, since: float | None, until: float | None, keep: bool, output: str) -> None:
    """Replay the last day in the simulator, by the operator's decisions; how far off is it?

    Compared are the jobs that ended. The operator does the same each day, with --keep.
    In the operator's pod: kubectl exec -n ballast-system deploy/ballast -- ballast twin
    """
    from ballast_operator.history.recording import TwinResult
    from ballast_operator.history.store import History

    found = replayed(recorded(path, since, until))
    result = TwinResult.of(found)
    if keep:
        try:
            History(path).put([result.as_row()], create=False)
        except HistoryError as error:
            raise click.ClickException(str(error)) from error
    if output == "text":
        click.echo(_twin_text(found, result.text))
        return
    print_objects({**found.to_json(), "agrees": result.agrees, "within": result.within}, output)


def recorded(path: str, since: float | None, until: float | None) -> "Recording":
    """Recording of history over the time, by default of the last day.

    Raises:
        UsageError: the time ends before it begins.
        ClickException: history cannot be read.
    """
    from ballast_operator.history.store import History
    from ballast_operator.history.twin import read_recording

    until = time.time() if until is None else until
    since = until - DAY if since is None else since
    if since >= until:
        raise click.UsageError("--since: it is not before --until. To fix: name an earlier time")
    try:
        return read_recording(History(path), since, until)
    except HistoryError as error:
        raise click.ClickException(str(error)) from error


def replayed(recording: "Recording", objective: str = "") -> "Replay":
    """The recording played again, by another policy if one is named. Raises ClickException: it cannot be."""
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.simulator.clock import SimulationError
    from ballast_policies.simulator.replay import replay

    try:
        return replay(recording, objective=objective)
    except (ProblemError, SimulationError) as error:
        raise click.ClickException(f"{error}. To fix: choose another time by --since and --until") from error


def _twin_text(found: "Replay", said: str) -> str:
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


def against(path: str, policies: Sequence[str], since: float | None, until: float | None) -> dict[str, Any]:
    """Costs as JSON: what was paid, what the replay of the policy in force pays, and each of the others.

    Raises:
        ClickException: history cannot be read, or a policy cannot be used on what is in it.
    """
    from ballast_policies.simulator.least_cost import least_cost

    from ballast_operator.api.cluster_policy import CHOOSABLE

    recording = recorded(path, since, until)
    names = [each for name in policies for each in (CHOOSABLE if name == "all" else (name,))]
    found = [replayed(recording, name) for name in dict.fromkeys(["", *names])]
    jobs = found[0].jobs
    return {
        "since": recording.since,
        "until": recording.until,
        "jobs": len(jobs),
        "left_out": dict(recording.left_out),
        "recorded": {
            "cost": math.fsum(job.recorded_cost for job in jobs),
            "mean_seconds": _mean([job.recorded_seconds for job in jobs]),
        },
        "in_force": _row(found[0], recording),
        "policies": [_row(each, recording) for each in found[1:]],
        "least_cost": least_cost(recording),
    }


def _row(found: "Replay", recording: "Recording") -> dict[str, Any]:
    """Lines of a policy; ``least_cost``: no policy that is done as soon could have paid less."""
    from ballast_policies.simulator.least_cost import least_cost

    starts = {job.one.name: job.arrival for job in recording.jobs}
    ends = [starts[job.job] + job.seconds for job in found.jobs if job.seconds is not None]
    least = least_cost(recording, by=max(ends)) if ends and not found.unfinished else math.inf
    return {
        "policy": found.policy,
        "cost": math.fsum(job.cost for job in found.jobs),
        "mean_seconds": _mean([job.seconds for job in found.jobs if job.seconds is not None]),
        "starts": sum(job.starts for job in found.jobs),
        "unfinished": len(found.unfinished),
        "least_cost": least if math.isfinite(least) else None,
    }


def _mean(seconds: Sequence[float]) -> float | None:
    return math.fsum(seconds) / len(seconds) if seconds else None


def against_text(found: dict[str, Any]) -> str:
    """A table, and the bound."""
    if not found["jobs"]:
        return "no job that can be replayed has ended in this time"
    lines = [f"{'':34} {'cost':>12} {'mean h':>9} {'starts':>7} {'at least':>12}"]
    rows = [
        ("as recorded", found["recorded"] | {"starts": "", "least_cost": None}),
        (f"{found['in_force']['policy']} (replay)", found["in_force"]),
        *((row["policy"], row) for row in found["policies"]),
    ]
    for name, row in rows:
        least = "" if row["least_cost"] is None else f"{row['least_cost']:.2f}"
        mean = "" if row["mean_seconds"] is None else f"{row['mean_seconds'] / 3600:.3f}"
        more = f"  {row['unfinished']} jobs do not end" if row.get("unfinished") else ""
        lines.append(f"{name:34} {row['cost']:12.2f} {mean:>9} {row['starts']:>7} {least:>12}{more}")
    lines.append(
        f"of {found['jobs']} jobs. No policy could have paid less than {found['least_cost']:.2f}, and none "
        "that is done as soon as one of these less than its `at least`"
    )
    lines += [f"left out: {name}: {why}" for name, why in sorted(found["left_out"].items())]
    return "\n".join(lines)
