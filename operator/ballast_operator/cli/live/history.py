"""``ballast history``: what jobs did, also those that are deleted."""

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ballast_operator.cli.option_names import printable

if TYPE_CHECKING:
    from ballast_operator.history.store import JobRecord


@click.command()
@click.argument("job", default="")
@click.option("-n", "--namespace", default="", help="Jobs of this namespace; default: all.")
@click.option(
    "--file",
    "path",
    envvar="BALLAST_HISTORY",
    required=True,
    show_envvar=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The operator's file; in its pod it is set.",
)
@click.option("--last", default=50, show_default=True, type=click.IntRange(1, 100_000), help="So many jobs.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def history(job: str, namespace: str, path: Path, last: int, output: str) -> None:
    """What jobs did, also deleted ones, the newest change first; of JOB, what has happened to it, too.

    In the operator's pod: kubectl exec -n ballast-system deploy/ballast -- ballast history
    """
    from ballast_operator.history.store import HistoryError, read_events, read_jobs

    try:
        found = read_jobs(path, namespaces=[namespace] if namespace else None, name=job, most=last)
        events = {each.uid: read_events(path, each.uid) for each in found} if job else {}
    except HistoryError as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        rows = []
        for each in found:
            row = dataclasses.asdict(each)
            if job:
                row["events"] = [
                    {"at": at, "what": what, "text": text} for at, what, text in events[each.uid]
                ]
            rows.append(row)
        click.echo(json.dumps({"jobs": rows}, indent=2))
        return
    if not found:
        click.echo("there is no such job in history")
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
    return (
        f"{job.namespace}/{job.name}: {job.state} {_time(job.updated)}{gone}; step {job.step} of "
        f"{job.total_steps}, {job.launches} launches, {job.gpu_seconds / 3600:.2f} GPU h, "
        f"cost {job.cost:.2f}{good}{lost}; {job.message}"
    )
