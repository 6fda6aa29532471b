"""Commands on training jobs of a live cluster: ``jobs``, ``logs``, ``suspend``, ``resume``, ``delete``."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.api.conditions import STATES
from ballast_operator.cli.live.connection import (
    cluster_errors,
    job_argument,
    kubeconfig_option,
    namespace_option,
)
from ballast_operator.cli.option_names import printable

if TYPE_CHECKING:
    from ballast.client import Client, Job, Jobs

of_job = namespace_option("The job's namespace.", "default")


@contextlib.contextmanager
def connected(kubeconfig: str | None, namespace: str = "default") -> Iterator["Client"]:
    """The client; what it raises is an error of the command."""
    from ballast.client import Client

    with cluster_errors(), Client(kubeconfig, namespace=namespace) as client:
        yield client


def named(job: str, namespace: str) -> str:
    """The job as a command is given it."""
    return job if namespace == "default" else f"{job} -n {namespace}"


@click.command()
@namespace_option("Jobs of this namespace; default: all.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(STATES, case_sensitive=False), help="Several: any."
)
@click.option("--team", help="Jobs with this spec.entity.")
@click.option(
    "--limit", default=500, show_default=True, type=click.IntRange(min=0), help="At most so many; 0: all."
)
@kubeconfig_option
@click.option(
    "--output", type=click.Choice(["text", "wide", "json", "yaml"]), default="text", show_default=True
)
def jobs(
    namespace: str, states: tuple[str, ...], team: str | None, limit: int, kubeconfig: str | None, output: str
) -> None:
    """List training jobs."""
    with connected(kubeconfig, namespace) as client:
        found = client.list(states=states, team=team, limit=limit)
    if output in ("json", "yaml"):
        print_objects(listed(found), output)
    else:
        _print_rows(found, wide=output == "wide")
    if found.more:
        click.echo(f"there are others beside these {limit}. To fix: --limit 0 shows all", err=True)


def listed(found: "Sequence[Job]") -> dict[str, Any]:
    """Jobs as an object that `kubectl` takes."""
    return {"apiVersion": "v1", "kind": "List", "items": [job.raw for job in found]}


def print_objects(content: Any, output: str) -> None:
    """Print as JSON or YAML."""
    if output == "json":
        click.echo(json.dumps(content, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), nl=False)


def _print_rows(found: "Jobs", *, wide: bool) -> None:
    from ballast.client.job import COLUMNS, WIDE_COLUMNS

    columns = WIDE_COLUMNS if wide else COLUMNS
    rows = [[printable(cell).replace("\n", " ") for cell in row[: len(columns)]] for row in found.rows()]
    if not rows:
        click.echo("there are no such jobs")
        return
    lines = [[name.upper() for name in columns], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@click.command()
@job_argument
@of_job
@click.option("--rank", type=click.IntRange(min=0), help="Of the pod with this number alone.")
@click.option("-f", "--follow", is_flag=True, help="Go on, over later launches, until the job has ended.")
@click.option("-p", "--previous", is_flag=True, help="Of the launch before, while its pods are there.")
@click.option("--tail", type=click.IntRange(min=0), help="Of each pod the last lines only.")
@kubeconfig_option
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: by line."
)
def logs(job: str, namespace: str, kubeconfig: str | None, output: str, **wanted: Any) -> None:
    """Print what all ranks of JOB have logged, by time; by step where nodes keep no times."""
    import dataclasses

    if wanted["follow"] and wanted["previous"]:
        raise click.UsageError("--previous: not with --follow. To fix: leave one of them out")
    with contextlib.suppress(KeyboardInterrupt), connected(kubeconfig, namespace) as client:
        for line in client.logs(job, **wanted):
            if output == "json":
                click.echo(json.dumps(dataclasses.asdict(line)))
            else:
                click.echo(f"[{line.launch}-{line.rank}] {printable(line.text)}")


@click.command()
@job_argument
@of_job
@kubeconfig_option
def suspend(job: str, namespace: str, kubeconfig: str | None) -> None:
    """Have JOB save a checkpoint and give its GPUs back until it is resumed."""
    with connected(kubeconfig, namespace) as client:
        client.suspend(job)
    click.echo(f"{namespace}/{job} saves and stops; `ballast resume {named(job, namespace)}` takes it back")


@click.command()
@job_argument
@of_job
@kubeconfig_option
def resume(job: str, namespace: str, kubeconfig: str | None) -> None:
    """Have JOB take part again after it was suspended."""
    with connected(kubeconfig, namespace) as client:
        client.resume(job)
    why = f"`ballast explain {named(job, namespace)}` says what it waits for"
    click.echo(f"{namespace}/{job} takes part again; {why}")


@click.command()
@job_argument
@of_job
@kubeconfig_option
def delete(job: str, namespace: str, kubeconfig: str | None) -> None:
    """Delete JOB with its pods. Its checkpoints stay."""
    with connected(kubeconfig, namespace) as client:
        client.delete(job)
    click.echo(f"{namespace}/{job} deleted")
