"""``ballast submit``: training jobs from a file, or one from flags."""

import contextlib
import math
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.connection import kubeconfig_option, namespace_option
from ballast_operator.cli.live.jobs import connected, listed, named, print_objects
from ballast_operator.cli.live.manifests import read_manifests, title
from ballast_operator.cli.option_names import Number, printable
from ballast_operator.cli.simulate.input import progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ballast.client import Job

    from ballast_operator.cli.live.whatif import LiveCluster


@click.command()
@click.argument("command", nargs=-1)
@click.option(
    "-f",
    "--file",
    type=click.Path(),
    metavar="FILE",
    help="TrainingJobs as YAML or JSON; -: standard input.",
)
@click.option("--name", help="Of the job.")
@click.option("--image", help="Of its container.")
@click.option("--gpus", metavar="N|MIN-MAX", help="How many, or the fewest and the most.")
@click.option("--steps", type=click.IntRange(min=1), help="spec.totalSteps.")
@click.option("--gpu-type", "gpu_types", multiple=True, metavar="TYPE", help="Only on these. [default: any]")
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Of the container.")
@click.option("--volume", metavar="CLAIM", help="A PersistentVolumeClaim, mounted at /checkpoints.")
@click.option("--checkpoint", metavar="FOLDER", help="[default: /checkpoints/NAME with --volume]")
@click.option("--team", help="spec.entity.")
@click.option("--budget", type=float, help="What it may cost.")
@namespace_option("Where; default: the manifest's, else default.", None)
@kubeconfig_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Submit nothing: say whether the cluster takes them, where and when they would run, at what cost.",
)
@click.option(
    "--within",
    "hours",
    default=24.0,
    show_default=True,
    type=Number(min=0, min_open=True, max=8760),
    help="Hours that --dry-run looks ahead, without further jobs.",
)
@click.option("--wait", is_flag=True, help="Until the jobs have ended; exit code 1: one has failed.")
@click.option("--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
def submit(
    command: tuple[str, ...],
    file: str | None,
    namespace: str | None,
    kubeconfig: str | None,
    dry_run: bool,
    hours: float,
    wait: bool,
    output: str,
    **flags: Any,
) -> None:
    """Submit training jobs: those of a file, or one that runs COMMAND, a process a GPU.

    \b
    ballast submit -f job.yaml
    ballast submit --name mine --image mine:1 --gpus 2 --steps 1000 -- python train.py
    """  # noqa: D301 - click reads the escape
    from ballast.client import BallastError, JobFailed, NotConnected, NotFound

    if file is None:
        manifests = [_manifest(command, flags)]
    elif command or any(value not in (None, ()) for value in flags.values()):
        raise click.UsageError("-f: not with COMMAND or options of a job. To fix: write them into the file")
    else:
        manifests = read_manifests(file)
    with connected(kubeconfig) as client:
        made, failed = [], False
        for manifest in manifests:
            try:
                made.append(client.submit(manifest, namespace=namespace, dry_run=dry_run))
            except BallastError as error:
                click.echo(printable(f"Error: {title(manifest)}: {error}"), err=True)
                failed = True
                if isinstance(error, NotConnected):
                    break
        if dry_run and made:
            _foretell(made, kubeconfig, hours, output)
        elif output in ("json", "yaml") and made:
            print_objects(made[0].raw if len(made) == 1 else listed(made), output)
        else:
            for job in made:
                again = f"`ballast explain {named(job.name, job.namespace)}` says more"
                click.echo(f"{job.namespace}/{job.name} submitted; {again}")
        if wait and not dry_run:
            with contextlib.suppress(KeyboardInterrupt):
                for job in made:
                    try:
                        client.wait(
                            job.name,
                            namespace=job.namespace,
                            each=lambda seen: click.echo(printable(f"{seen}"), err=True),
                        )
                    except (JobFailed, NotFound) as error:  # the others go on
                        click.echo(printable(f"Error: {error}"), err=True)
                        failed = True
    if failed:
        raise SystemExit(1)


def _foretell(made: "list[Job]", kubeconfig: str | None, hours: float, output: str) -> None:
    """Print where, when and at what cost the jobs would run, by the operator's own decisions."""
    import asyncio

    from ballast_policies.allocation.problem import ProblemError

    from ballast_operator.cli.live.whatif_over_time import course
    from ballast_operator.errors import Forbidden

    names = [f"{job.namespace}/{job.name}" for job in made]
    rows: list[dict[str, Any]] = [{"job": name, "valid": True} for name in names]
    asked = hours
    try:
        live = asyncio.run(_with(made, kubeconfig))
        refused = {"/".join(one.view.key): one.refusal.message for one in live.snapshot.refused}
        with progress_bar(output) as progress:
            jobs, hours = course(live, hours, names, progress)
        courses = {one.name: one for one in jobs}
    except (Forbidden, ProblemError) as error:
        rows = [{**row, "unknown": str(error)} for row in rows]
    else:
        for row in rows:
            found = courses.get(row["job"])
            if found is None:
                row["unknown"] = refused.get(row["job"]) or "it takes no part in decisions"
                continue
            row |= {"where": found.first or None, "begins_seconds": found.begins, "ends_seconds": found.ends}
            row |= {"stops_seconds": found.stops, "stopped_by": found.stopped_by or None}
            due = found.one.job.deadline
            row["misses_deadline"] = due is not None and due < min(found.ends or math.inf, hours * 3600)
            row |= {"gpu_hours": found.gpu_hours, "cost": found.cost}
            row["speed_measured"] = row["job"] not in live.snapshot.unmeasured
    if output in ("json", "yaml"):
        print_objects({"within_hours": hours, "jobs": rows}, output)
    else:
        lines = [_row_text(row, hours) for row in rows]
        if hours < asked:
            lines.append(
                f"after {hours:.4g} of {asked:g} h this forecast has taken too many decisions. "
                f"To fix: --within {0.9 * hours:.2g}"
            )
        click.echo(printable("\n".join(lines)))


def _row_text(row: dict[str, Any], hours: float) -> str:
    if "unknown" in row:
        return f"{row['job']}: valid; where it would run is not known: {row['unknown']}"
    end, stops = row["ends_seconds"], row["stops_seconds"]
    if end is not None:
        ends = f"done after {end / 3600:.2f} h"
    elif stops is not None:
        of = " of the ClusterPolicy" if row["stopped_by"].startswith("budgets.") else ""
        ends = f"stopped, not done, after {stops / 3600:.2f} h by spec.{row['stopped_by']}{of}"
    else:
        ends = f"not done within {hours:.4g} h"
    if row["begins_seconds"] is None:
        return f"{row['job']}: valid; it would not start: {ends}"
    if row["misses_deadline"] and stops is None:
        ends += ", after spec.deadline"
    start = row["begins_seconds"] / 3600
    guess = (
        "" if row["speed_measured"] else "; its speed is a guess: state spec.throughput for better figures"
    )
    begins = "now" if start < 0.01 else f"in {start:.2f} h"
    return (
        f"{row['job']}: valid; starts {begins} on {row['where']}, {ends}, "
        f"costs {row['cost']:.2f} ({row['gpu_hours']:.2f} GPU h){guess}"
    )


async def _with(made: "list[Job]", kubeconfig: str | None) -> "LiveCluster":
    from ballast_operator.cli.live.whatif import read_cluster
    from ballast_operator.kube.client import connect

    async with await connect(kubeconfig) as cluster:
        return await read_cluster(
            cluster, more=[_as_if_kept(job.raw, number) for number, job in enumerate(made)]
        )


def _as_if_kept(raw: "Mapping[str, Any]", number: int) -> dict[str, Any]:
    metadata = {"uid": f"not-kept-{number}", "generation": 1, **raw["metadata"], "resourceVersion": "1"}
    return {"apiVersion": "ballast.dev/v1alpha1", "kind": "TrainingJob", **raw, "metadata": metadata}


def _manifest(command: tuple[str, ...], flags: dict[str, Any]) -> dict[str, Any]:
    from ballast.client import training_job

    needed = {
        "--name": flags["name"],
        "--image": flags["image"],
        "--steps": flags["steps"],
        "COMMAND": command,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        file = command[0] if len(command) == 1 and command[0].endswith((".yaml", ".json")) else "FILE"
        raise click.UsageError(
            f"{', '.join(missing)}: not given. To fix: -f {file}, or --name, --image, --steps and, after --, "
            "the command; a job with `model` needs a file"
        )
    environment = {}
    for pair in flags["environment"]:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--env: {pair!r:.80} has no name or no =. To fix: NAME=VALUE")
        environment[name] = value
    budget = flags["budget"]
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise click.UsageError(f"--budget: {budget} is no amount. To fix: a number above 0")
    return training_job(
        flags["name"],
        image=flags["image"],
        command=command,
        steps=flags["steps"],
        gpus=_gpus(flags["gpus"] or "1"),
        checkpoint=flags["checkpoint"],
        volume=flags["volume"],
        environment=environment,
        gpu_types=flags["gpu_types"],
        team=flags["team"],
        budget=budget,
    )


def _gpus(text: str) -> tuple[int, int]:
    fewest, dash, most = text.partition("-")
    if not dash:
        most = fewest
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in (fewest, most)):
        raise click.UsageError(f"--gpus: {text!r:.40} is no number of GPUs. To fix: 4, or 2-8")
    if not 1 <= int(fewest) <= int(most):
        raise click.UsageError(f"--gpus: {text} has no GPU, or fewest above most. To fix: 4, or 2-8")
    return int(fewest), int(most)
