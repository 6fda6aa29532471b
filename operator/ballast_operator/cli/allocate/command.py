"""``ballast allocate``: one allocation from a file of jobs, by the operator's own policies."""

import dataclasses
import gc
import json
import math
from typing import Any, TextIO

import click
from ballast_policies.allocation.gang_sizes import MOST_LISTED
from ballast_policies.allocation.generated import GENERATES, allocate_generated
from ballast_policies.allocation.problem import Allocation, Problem, ProblemError
from ballast_policies.allocation.registry import POLICIES, find_policy
from ballast_policies.allocation.registry import allocate as solve
from ballast_policies.allocation.solvers.linear import SolverError
from ballast_policies.configuration import Configuration
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ballast_operator.cli.allocate.input import Input, read_problem
from ballast_operator.cli.own_modules import import_from_here

INTERNAL = ("start",)
"""Fields of an Allocation that serve the next solve and are not printed."""


@click.command()
@click.option("--policy", required=True, help=f"One of {', '.join(POLICIES.builtin)}; or module:function.")
@click.option(
    "--input",
    "source",
    type=click.File(),
    required=True,
    help="JSON file of the problem; - reads standard input.",
)
@click.option("--agnostic", is_flag=True, help="The baseline for which all GPU types are alike.")
@click.option("--space-sharing", is_flag=True, help="Let the input's pairs of jobs share GPUs.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def allocate(policy: str, source: TextIO, agnostic: bool, space_sharing: bool, output: str) -> None:
    """Solve one allocation and print each job's share of time on each GPU type, or in each configuration.

    Bad input is refused with the field's name and exit code 2.
    """
    import_from_here(policy)
    try:
        find_policy(policy)
    except ProblemError as error:
        raise click.UsageError(f"--{error}") from error
    # Millions of values, none in a cycle: to look for cycles would take a fifth of the time.
    gc.disable()
    try:
        read = read_problem(source.read())
        allocation, generated = _solved(policy, read, agnostic=agnostic, space_sharing=space_sharing)
    except ProblemError as error:
        raise click.UsageError(str(error)) from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--input: {source.name} is not UTF-8: {error}") from error
    except SolverError as error:
        raise click.ClickException(
            f"{policy}: {error}. To fix: bring speeds, weights and prices closer together"
        ) from error
    finally:
        gc.enable()
    if output == "json":
        click.echo(json.dumps({**_as_json(allocation), **generated}, allow_nan=False))
    else:
        _print(allocation, read)


def _solved(
    policy: str, read: Input, *, agnostic: bool, space_sharing: bool
) -> tuple[Allocation, dict[str, Any]]:
    """(the answer, what the JSON has besides it where configurations were generated)."""
    if not read.sources:
        return solve(policy, read.problem, agnostic=agnostic, space_sharing=space_sharing), {}
    for option, given in (("--agnostic", agnostic), ("--space-sharing", space_sharing)):
        if given:
            job = next(iter(read.sources))
            raise ProblemError(f"{option}: not with jobs that have generate, as {job}. To fix: leave it out")
    if policy not in GENERATES:
        return solve(policy, _listed(policy, read)), {}
    found = allocate_generated(policy, read.problem, read.sources)
    configurations = {
        name: [
            {"name": each.name, "gpus": dict(each.gpus), "throughput": each.throughput}
            for each in some
            if each.throughput > 0
        ]
        for name, some in found.configurations.items()
    }
    return found.allocation, {"configurations": configurations}


def _listed(policy: str, read: Input) -> Problem:
    """The problem with all configurations of its jobs, for a policy that cannot ask for the best one."""
    jobs = []
    for job in read.problem.jobs:
        source = read.sources.get(job.name)
        if source is not None:
            listed = source.listed(read.problem.capacity)
            if listed is None:
                raise ProblemError(
                    f"jobs[{job.name}].generate: it has more than {MOST_LISTED:,} configurations, too many "
                    f"to list for {policy}. To fix: fewer sizes, or one of {', '.join(GENERATES)}"
                )
            # One that the cluster has no GPUs for is an elastic job all the same.
            idle = Configuration.of_one_type(read.problem.gpu_types[0], 1, 0.0)
            jobs.append(dataclasses.replace(job, configurations=listed or (idle,)))
        else:
            jobs.append(job)
    return dataclasses.replace(read.problem, jobs=tuple(jobs))


def _as_json(allocation: Allocation) -> dict[str, Any]:
    """The answer's keys; JSON has no infinity, so an objective or a gap that is infinite is null."""
    keys = [field.name for field in dataclasses.fields(allocation) if field.name not in INTERNAL]
    answer = {key: getattr(allocation, key) for key in keys}
    for key in ("objective", "gap"):
        answer[key] = _finite(answer[key])
    answer["shadow_prices"] = {t: _finite(price) for t, price in allocation.shadow_prices.items()}
    return answer


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _print(allocation: Allocation, read: Input) -> None:
    problem = read.problem
    elastic = {job.name for job in problem.jobs if job.configurations or job.name in read.sources}
    gpu_types = problem.gpu_types if len(elastic) < len(problem.jobs) else ()
    table = Table("job", *gpu_types, *(["configurations"] if elastic else []), "steps/s", "level")
    for job, row in allocation.allocation.items():
        shares = ["" if job in elastic else f"{row.get(gpu_type, 0.0):.3f}" for gpu_type in gpu_types]
        if elastic:
            used = [f"{name} {share:.3f}" for name, share in row.items() if share > 0 and job in elastic]
            shares.append(escape(", ".join(used)))
        speed, level = allocation.throughput[job], allocation.levels[job]
        table.add_row(escape(job), *shares, f"{speed:.4g}", f"{level:.4f}")
    console = Console()
    console.print(table)
    for pair, row in allocation.pair_allocation.items():
        shares = [f"{gpu_type} {share:.3f}" for gpu_type, share in row.items() if share > 0]
        if shares:
            console.print(f"{pair} share GPUs: {', '.join(shares)}")
    if allocation.unmet_deadlines:
        console.print(f"deadlines that cannot be kept: {', '.join(allocation.unmet_deadlines)}")
    gap = "no bound" if allocation.gap is None else f"gap {allocation.gap:.1e}"
    console.print(
        f"{allocation.policy}: objective {allocation.objective:.6g}, {allocation.status}, {gap}, "
        f"{allocation.solve_seconds:.3f} s by {allocation.solver}"
    )
    for line in allocation.fallbacks:
        console.print(escape(line))
