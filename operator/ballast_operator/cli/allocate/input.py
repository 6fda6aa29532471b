"""The input of ``ballast allocate``: the Problem of a JSON text."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ballast_policies.allocation.gang_sizes import GangSizes
from ballast_policies.allocation.problem import Problem, ProblemError
from ballast_policies.contract import ContractError
from ballast_policies.contract import errors as contract
from ballast_policies.contract.decode import decode, parse_json

SMALLEST, LARGEST = 1e-9, 1e15
"""Limits of numbers other than 0; speeds, prices, weights and times of real clusters lie within."""


GENERATE = "generate"
"""Key of a job that states its configurations by numbers of GPUs instead of listing them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a text states.

    Attributes:
        problem: the cluster and its jobs; those in ``sources`` have neither throughput nor configurations.
        sources: name of a job -> how its configurations follow from numbers of GPUs.
    """

    problem: Problem
    sources: Mapping[str, GangSizes]


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
    """The problem, with speeds for each job.

    Raises:
        ContractError: a value does not fit, or a job has no speeds, or two sets of them.
    """
    wrong = list(_without_one_way_to_run(value))
    sizes: dict[int, GangSizes] = {}
    for index, job in enumerate(_jobs(value)):
        if isinstance(job, Mapping) and job.get(GENERATE) is not None:
            try:
                path = f"jobs[{index}].{GENERATE}"
                sizes[index] = decode(GangSizes, job[GENERATE], path=path, spelling=str, parsed=True)
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
    """One problem for each number too small or too large for sums in floating point."""
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
    """One problem for each job without ``throughput``, ``configurations`` and ``generate``, or with two."""
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
    """One problem for each GPU type that is not there, and for each job with too many sizes to look at."""
    types, capacity = read.problem.gpu_types, read.problem.capacity.values()
    for index, job in enumerate(read.problem.jobs):
        source, path = read.sources.get(job.name), f"jobs[{index}].{GENERATE}"
        if source is None:
            continue
        for gpu_type in source.throughput:
            if gpu_type not in types:
                yield contract.Problem(f"{path}.throughput.{gpu_type}", f"not one of gpu_types {list(types)}")
        reason = source.too_many_sizes(int(sum(capacity) if source.mixed else max(capacity, default=0)))
        if reason is not None:
            yield contract.Problem(f"{path}.sizes", reason)


def _unusable_names(problem: Problem) -> Iterator[contract.Problem]:
    """One problem for each empty name, and for each GPU type that ``gpu_types`` does not have."""
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
