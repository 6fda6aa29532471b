"""``ballast simulate --elastic``: jobs that run on any of their configurations."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.simulate.progress import progress_bar

if TYPE_CHECKING:
    from ballast_policies.simulator.elastic.engine import ElasticResult
    from ballast_policies.simulator.elastic.workload_file import Sizes

ONLY_WITHOUT = {
    "cluster": None,
    "prices": None,
    "gpus_per_node": None,
    "agnostic": False,
    "space_sharing": False,
    "ideal": False,
    "measure": None,
    "plot": None,
    "trace": None,
    "generate": None,
    "rate": None,
    "static_jobs": None,
    "weights": False,
    "deadlines": False,
}
"""Options that have no meaning for elastic jobs, and their values where they are left out."""

OPTION_OF = {"static_jobs": "--static"}


def simulate_elastic(
    path: Path,
    *,
    policy: str,
    workload: str | None,
    sizes: "Sizes",
    round_seconds: float,
    output: str,
    per_job: bool,
    others: dict[str, Any],
) -> None:
    """Run one workload of the file and print the result.

    Raises:
        UsageError: the file or an option cannot be used.
    """
    from ballast_policies.contract.errors import ContractError
    from ballast_policies.elastic.registry import ELASTIC_POLICIES
    from ballast_policies.simulator.elastic.engine import SimulationError, simulate
    from ballast_policies.simulator.elastic.workload_file import read_workload

    for name, left_out in ONLY_WITHOUT.items():
        if others.get(name, left_out) != left_out:
            option = OPTION_OF.get(name, "--" + name.replace("_", "-"))
            raise click.UsageError(
                f"{option}: not with --elastic, whose file has cluster and jobs. To fix: leave it out"
            )
    if policy not in ELASTIC_POLICIES:
        raise click.UsageError(
            f"--policy: {policy!r} chooses no sizes. To fix: one of {', '.join(sorted(ELASTIC_POLICIES))}"
        )
    if not 0 < round_seconds < float("inf"):
        raise click.UsageError(f"--round: {round_seconds:g} s must be above 0")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--elastic: {path} cannot be read: {error}") from error
    try:
        chosen = read_workload(text, workload=workload, sizes=sizes)
    except ContractError as error:
        raise click.UsageError(f"--elastic: {path}: {error}") from error
    try:
        with progress_bar(output) as progress:
            result = simulate(chosen, policy=policy, round_seconds=round_seconds, progress=progress)
    except SimulationError as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        click.echo(json.dumps(result.to_json(per_job=per_job), indent=2))
    else:
        _print(result, per_job=per_job)


def _print(result: "ElasticResult", *, per_job: bool) -> None:
    from ballast_policies.simulator.result import HOUR
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{result.workload}: {result.policy}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in (
        ("jobs", f"{len(result.jobs)}"),
        ("average completion time", f"{result.average_completion_time:,.0f} s"),
        ("  of each job alone on its best configuration", f"{result.average_alone:,.0f} s"),
        ("  99 % are done within", f"{result.percentile(99):,.0f} s"),
        ("makespan", f"{result.makespan:,.0f} s"),
        ("restarts a job", f"{result.restarts_per_job:.2f}"),
        ("utilisation", f"{result.utilisation:.1%}"),
        (f"decisions, in rounds of {result.round_seconds:g} s", f"{result.decisions}"),
    ):
        table.add_row(name, value)
    console.print(table)
    if per_job:
        rows = Table(title="jobs")
        rows.add_column("job")
        for heading in ("arrival s", "done after s", "alone s", "restarts", "GPU hours"):
            rows.add_column(heading, justify="right")
        for job in result.jobs:
            rows.add_row(
                job.name,
                f"{job.arrival:,.0f}",
                f"{job.completion_time:,.0f}",
                f"{job.alone:,.0f}",
                f"{job.restarts}",
                f"{job.gpu_seconds / HOUR:.2f}",
            )
        console.print(rows)
