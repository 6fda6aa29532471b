"""What a policy's row says that it reads is what its answer depends on, and nothing else."""

import builtins
import dataclasses
import functools

import numpy as np
import pytest
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.problem import Entity, Job, Problem
from ballast_policies.allocation.registry import POLICIES, allocate, imports_of

from tests.policies.allocation.configurations.instances import problem_of
from tests.support.examples import in_proportion

SEEDS = range(8)
TYPES = ("a", "b", "c")
# Without pairs of jobs, this policy divides the GPUs alike; its pairs read their own throughputs.
ALONE = [name for name in POLICIES.builtin if name != "gandiva"]


def random_problem(random: np.random.Generator) -> Problem:
    """Six single-GPU jobs in two teams on some GPUs of three types; all fields are given."""
    jobs = []
    for number in range(6):
        rates = random.uniform(1.0, 9.0, 3)
        steps = float(random.uniform(1e3, 1e5))
        jobs.append(
            Job(
                name=f"job-{number}",
                throughput=dict(zip(TYPES, rates.tolist(), strict=True)),
                weight=float(random.uniform(0.5, 2.0)),
                entity=("vision", "speech")[number % 2],
                steps_remaining=steps,
                elapsed=float(random.uniform(1.0, 1e4)),
                isolated_elapsed=float(random.uniform(1.0, 1e4)),
                deadline=float(random.uniform(2e3, 2e4)),
                # A step costs about a ten thousandth.
                budget=steps * float(random.uniform(0.5e-4, 2e-4)),
            )
        )
    return Problem(
        gpu_types=TYPES,
        capacity=dict(zip(TYPES, random.integers(1, 5, 3).tolist(), strict=True)),
        jobs=tuple(jobs),
        prices=dict(zip(TYPES, random.uniform(0.5, 4.0, 3).tolist(), strict=True)),
        entities={"vision": Entity(weight=3.0, policy="fifo"), "speech": Entity()},
    )


def changed(problem: Problem, what: str, random: np.random.Generator) -> Problem:
    """The problem with one thing about it drawn again."""
    other = random_problem(random)
    if what == Reads.PRICES:
        return dataclasses.replace(problem, prices=other.prices)
    if what == Reads.TEAMS:
        jobs = tuple(dataclasses.replace(job, entity=None) for job in problem.jobs)
        return dataclasses.replace(problem, jobs=jobs, entities={})
    if what == "speeds":
        factors = 10 ** random.uniform(-2.0, 2.0, len(problem.jobs))
        jobs = tuple(
            dataclasses.replace(job, throughput={t: rate * factor for t, rate in job.throughput.items()})
            for job, factor in zip(problem.jobs, factors.tolist(), strict=True)
        )
        return dataclasses.replace(problem, jobs=jobs)
    field = "elapsed" if what == Reads.ARRIVAL_ORDER else what
    jobs = tuple(
        dataclasses.replace(job, **{field: getattr(drawn, field)})
        for job, drawn in zip(problem.jobs, other.jobs, strict=True)
    )
    return dataclasses.replace(problem, jobs=jobs)


@functools.cache
def shares(policy: str, seed: int) -> dict[str, dict[str, float]]:
    """Those of the seed's problem as it is drawn first."""
    return allocate(policy, random_problem(np.random.default_rng(seed))).allocation


def depends(policy: str, what: str, expected: bool) -> bool:
    """Whether the shares differ, for one of the seeds: of all where they should, else of a few each day."""
    for seed in SEEDS if expected else SEEDS[: in_proportion(len(SEEDS))]:
        random = np.random.default_rng(seed)
        problem = random_problem(random)
        before = shares(policy, seed)
        after = allocate(policy, changed(problem, what, random)).allocation
        for name, row in before.items():
            if any(abs(row[t] - after[name][t]) > 1e-4 for t in TYPES):
                return True
    return False


@pytest.mark.parametrize("what", list(Reads))
@pytest.mark.parametrize("policy", ALONE)
def test_a_policy_reads_what_its_row_says(policy, what):
    """Drawn again, what it reads changes its shares for some seed, and what it does not read for none."""
    reads = POLICIES[policy].reads
    if what in (Reads.ELAPSED, Reads.ARRIVAL_ORDER):
        # Seconds since arrival hold both; a policy that reads either depends on them.
        expected = bool(reads & {Reads.ELAPSED, Reads.ARRIVAL_ORDER})
    else:
        expected = what in reads
    assert depends(policy, what, expected) == expected


@pytest.mark.parametrize("policy", ALONE)
def test_a_policy_compares_speeds_where_its_row_says_so(policy):
    """A job whose every speed is multiplied keeps its shares under the others."""
    expected = POLICIES[policy].compares_speeds
    assert depends(policy, "speeds", expected) == expected


@pytest.mark.parametrize("policy", POLICIES.builtin)
def test_a_policy_imports_what_its_row_says(policy, monkeypatch):
    """An allocation imports these of scipy and cvxpy and no others; gangs on several types, scipy.sparse."""
    imported = set()
    importing = builtins.__import__

    def recorded(name, globals=None, locals=None, fromlist=(), level=0):
        if (globals or {}).get("__name__", "").startswith("ballast_policies"):
            for found in (name, *(f"{name}.{each}" for each in fromlist or ())):
                imported.update({found} & {"cvxpy", "scipy.optimize", "scipy.sparse"})
        return importing(name, globals, locals, fromlist, level)

    problems = [random_problem(np.random.default_rng(0))]
    if POLICIES[policy].takes_configurations:
        problems.append(problem_of("mixed types", 1))
    for problem in problems:
        imported.clear()
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", recorded)
            allocate(policy, problem)
        assert imported == imports_of(policy, problem)
    assert imports_of("my_policies:longest_first", problems[0]) == {"cvxpy"}
