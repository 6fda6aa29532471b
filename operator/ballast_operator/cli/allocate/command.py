"""``ballast allocate``: one allocation from a file of jobs, by the operator's own policies."""

import dataclasses
import gc
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import click
import numpy as np
from ballast_policies.allocation.gang_sizes import MOST_LISTED, GangSizes
from ballast_policies.allocation.generated import GENERATES, allocate_generated
from ballast_policies.allocation.planned_gangs import PlannedGang
from ballast_policies.allocation.problem import Allocation, Configuration, Problem, ProblemError
from ballast_policies.allocation.registry import POLICIES, check_shares, find_policy
from ballast_policies.allocation.registry import allocate as solve
from ballast_policies.allocation.solvers.linear import SolverError
from ballast_policies.contract import errors as contract
from ballast_policies.contract.decode import decode, parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import FILE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ballast_operator.cli.option_names import import_from_here, with_option

SMALLEST, LARGEST = 1e-9, 1e15
"""Limits of numbers other than 0; speeds, prices, weights and times of real clusters lie within."""


GENERATE = "generate"
"""Key of a job that states its configurations by numbers of GPUs instead of listing them."""
PLANNED_WITHIN = 0.01
"""Part of the optimum that may be missing where plans are looked for."""

Source = GangSizes | PlannedGang


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Content of a problem's text.

    Attributes:
        problem: the cluster and its jobs; those in ``sources`` have neither throughput nor configurations.
        sources: name of a job -> how its configurations follow from numbers of GPUs.
    """

    problem: Problem
    sources: Mapping[str, Source]


def read_problem(text: str) -> Input:
    """The problem that a JSON text states. Its keys are the fields of :class:`Problem`, and ``generate``.

    Raises:
        ProblemError: not JSON, an unknown or missing key, or an impossible value; the text names the field.
    """
    try:
        value = parse_json(text)
        impossible = list(_beyond_limits(value, ""))
        if impossible:
            raise ContractError(impossible)
        if isinstance(value, Mapping) and isinstance(value.get("capacity"), Mapping):
            value = {**value, "capacity": _of_every_type(value)}
        read = _decoded(value)
    except ContractError as error:
        raise ProblemError("; ".join(map(_shown, error.problems))) from error
    unusable = [*_unusable_names(read.problem), *_unusable_sizes(read)]
    if unusable:
        raise ProblemError("; ".join(map(str, unusable)))
    return read


def _decoded(value: Any) -> Input:
    """The problem, with each job's speeds. Raises ContractError: a value does not fit, or no or two sets."""
    wrong = list(_without_one_way_to_run(value))
    sizes: dict[int, Source] = {}
    for index, job in enumerate(_jobs(value)):
        if isinstance(job, Mapping) and job.get(GENERATE) is not None:
            try:
                path, stated = f"jobs[{index}].{GENERATE}", job[GENERATE]
                planned = isinstance(stated, Mapping) and "profiles" in stated
                kind: type[Source] = PlannedGang if planned else GangSizes
                sizes[index] = decode(kind, stated, path=path, spelling=str, parsed=True)
            except ContractError as error:
                wrong += error.problems
    try:
        problem = decode(Problem, _without_generate(value), spelling=str, parsed=True)
    except ContractError as error:
        raise ContractError([*error.problems, *wrong]) from error
    if wrong:
        raise ContractError(wrong)
    return Input(
        problem=problem, sources={problem.jobs[index].name: source for index, source in sizes.items()}
    )


def _jobs(value: Any) -> list[Any]:
    jobs = value.get("jobs") if isinstance(value, Mapping) else None
    return jobs if isinstance(jobs, list) else []


def _without_generate(value: Any) -> Any:
    if not any(isinstance(job, Mapping) and GENERATE in job for job in _jobs(value)):
        return value
    jobs = [
        {key: each for key, each in job.items() if key != GENERATE} if isinstance(job, Mapping) else job
        for job in _jobs(value)
    ]
    return {**value, "jobs": jobs}


def _shown(problem: contract.Problem) -> str:
    """Field and reason as text; the path is not repeated where the reason begins with it."""
    if not problem.path:
        return problem.reason if ": " in problem.reason else f"the input: {problem.reason}"
    collection = problem.path.partition("[")[0]
    return problem.reason if problem.reason.startswith(f"{collection}[") else str(problem)


def _of_every_type(value: Mapping[str, Any]) -> dict[str, Any]:
    """The capacity, with 0 of each GPU type that it does not name."""
    types = value.get("gpu_types")
    texts = [name for name in types if isinstance(name, str)] if isinstance(types, list) else []
    return {**dict.fromkeys(texts, 0), **value["capacity"]}


def _beyond_limits(value: Any, path: str) -> Iterator[contract.Problem]:
    """Problems, one for each number too small or too large for sums in floating point."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        # Most items are leaves within the limits, of which there may be millions: no path for these.
        within = not isinstance(item, int | float) or item == 0 or SMALLEST <= abs(item) <= LARGEST
        if within and not isinstance(item, dict | list):
            continue
        here = f"{path}[{key}]" if isinstance(value, list) else contract.join_path(path, key)
        if within:
            yield from _beyond_limits(item, here)
        else:
            reason = f"{item:.0e} is not between {SMALLEST:g} and {LARGEST:g}. To fix: other units"
            yield contract.Problem(here, reason)


def _without_one_way_to_run(value: Any) -> Iterator[contract.Problem]:
    """Problems, one for each job without ``throughput``, ``configurations`` and ``generate``, or with two."""
    for index, job in enumerate(_jobs(value)):
        if not isinstance(job, Mapping):
            continue
        path = f"jobs[{index}]"
        stated = next((key for key in (GENERATE, "configurations") if job.get(key) is not None), None)
        if stated is None:
            if job.get("throughput") is None:
                yield contract.Problem(
                    f"{path}.throughput", "missing. To fix: give it a value, or configurations in its place"
                )
            continue
        if job.get("configurations") == []:
            yield contract.Problem(f"{path}.configurations", "there is none. To fix: give at least one")
        for key in ("throughput", "gpus", *(["configurations"] if stated == GENERATE else [])):
            if job.get(key) is not None:
                has = f"{GENERATE} states" if stated == GENERATE else "the configurations state"
                reason = f"{has} it. To fix: leave it out, or give no {stated}"
                yield contract.Problem(f"{path}.{key}", reason)


def _unusable_sizes(read: Input) -> Iterator[contract.Problem]:
    """Problems, one for each GPU type that is not there, and for each job with too many sizes to look at."""
    types, capacity = read.problem.gpu_types, read.problem.capacity.values()
    for index, job in enumerate(read.problem.jobs):
        source, path = read.sources.get(job.name), f"jobs[{index}].{GENERATE}"
        if source is None:
            continue
        key = "speeds" if isinstance(source, PlannedGang) else "throughput"
        for gpu_type in getattr(source, key):
            if gpu_type not in types:
                yield contract.Problem(f"{path}.{key}.{gpu_type}", f"not one of gpu_types {list(types)}")
        if isinstance(source, PlannedGang):
            continue
        reason = source.too_many_sizes(int(sum(capacity) if source.mixed else max(capacity, default=0)))
        if reason is not None:
            yield contract.Problem(f"{path}.sizes", reason)


def _unusable_names(problem: Problem) -> Iterator[contract.Problem]:
    """Problems, one for each empty name, and for each GPU type that ``gpu_types`` does not have."""
    types = problem.gpu_types

    def unknown(names: Iterable[str], path: str) -> Iterator[contract.Problem]:
        for name in names:
            if name not in types:
                yield contract.Problem(f"{path}.{name}", f"not one of gpu_types {list(types)}")

    if "" in types:
        yield contract.Problem(f"gpu_types[{types.index('')}]", "expected a text, got ''")
    yield from unknown(problem.prices, "prices")
    for index, job in enumerate(problem.jobs):
        if not job.name:
            yield contract.Problem(f"jobs[{index}].name", "expected a text, got ''")
        yield from unknown(job.throughput, f"jobs[{index}].throughput")
        for place, configuration in enumerate(job.configurations):
            yield from unknown(configuration.gpus, f"jobs[{index}].configurations[{place}].gpus")
    for index, pair in enumerate(problem.pairs):
        yield from unknown(pair.throughput, f"pairs[{index}].throughput")


INTERNAL = ("start",)
"""Fields of an Allocation that serve the next solve and are not printed."""


@click.command()
@click.option("--policy", required=True, help=f"One of {', '.join(POLICIES.builtin)}; or module:function.")
@click.option(
    "--input",
    "source",
    type=click.File("rb"),
    required=True,
    help="JSON file of the problem; - reads standard input.",
)
@click.option("--agnostic", is_flag=True, help="The baseline for which all GPU types are alike.")
@click.option("--space-sharing", is_flag=True, help="Let the input's pairs of jobs share GPUs.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def allocate(policy: str, source: BinaryIO, agnostic: bool, space_sharing: bool, output: str) -> None:
    """Solve one allocation and print each job's share of time on each GPU type, or in each configuration.

    Bad input is refused with the field's name and exit code 2.
    """
    import_from_here(policy)
    try:
        find_policy(policy)
        if space_sharing:
            check_shares(policy)
    except ProblemError as error:
        raise click.UsageError(with_option(str(error), {})) from error
    # Millions of values, none in a cycle: to look for cycles would take a fifth of the time.
    gc.disable()
    try:
        read = read_problem(FILE.text(source))
        allocation, generated = _solved(policy, read, agnostic=agnostic, space_sharing=space_sharing)
    except ProblemError as error:
        raise click.UsageError(str(error)) from error
    except ContractError as error:
        raise click.UsageError(f"--input: {error}") from error
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
    planned = any(isinstance(source, PlannedGang) for source in read.sources.values())
    within = PLANNED_WITHIN if planned else 0.0
    found = allocate_generated(policy, read.problem, read.sources, within=within)
    configurations = {
        name: [
            {
                "name": each.name,
                "gpus": dict(each.gpus),
                "throughput": each.throughput,
                **_plan_of(each, read.sources[name]),
            }
            for each in some
            if each.throughput > 0
        ]
        for name, some in found.configurations.items()
    }
    return found.allocation, {"configurations": configurations}


def _plan_of(each: Configuration, source: Source) -> dict[str, Any]:
    """The keys of a configuration that was planned."""
    if not isinstance(source, PlannedGang):
        return {}
    found = source.plan_of(each)
    degrees = dataclasses.asdict(found.degrees)
    return {"plan": {**degrees, "layers": np.diff(found.cut.bounds).tolist()}}


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
    table = Table(
        "job", *map(escape, gpu_types), *(["configurations"] if elastic else []), "steps/s", "level"
    )
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
            console.print(escape(f"{pair} share GPUs: {', '.join(shares)}"))
    if allocation.unmet_deadlines:
        console.print(escape(f"deadlines that cannot be kept: {', '.join(allocation.unmet_deadlines)}"))
    gap = "no bound" if allocation.gap is None else f"gap {allocation.gap:.1e}"
    console.print(
        f"{allocation.policy}: objective {allocation.objective:.6g}, {allocation.status}, {gap}, "
        f"{allocation.solve_seconds:.3f} s by {allocation.solver}"
    )
    for line in allocation.fallbacks:
        console.print(escape(line))
