"""`ballast allocate` with jobs that state their configurations by numbers of GPUs."""

import copy
import json

import pytest
from ballast_operator.cli.allocate.command import allocate
from ballast_policies.allocation.gang_sizes import GangSizes
from ballast_policies.allocation.generated import GENERATES
from ballast_policies.allocation.registry import POLICIES
from click.testing import CliRunner

PROBLEM = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 6, "k80": 8},
    "jobs": [
        {"name": "pipeline", "generate": {"throughput": {"v100": 2, "k80": 0.6}, "microbatches": 8}},
        {
            "name": "measured",
            "weight": 2,
            "generate": {"throughput": {"v100": 1, "k80": 0.9}, "speedup": {"2": 1.9, "4": 3.5}},
        },
        {"name": "gang", "throughput": {"v100": 2, "k80": 1}, "gpus": 2},
    ],
}
LARGE = {**PROBLEM, "capacity": {"v100": 200, "k80": 300}}
ELASTIC = [name for name, row in POLICIES.builtin.items() if row.takes_configurations]


def run(problem, *options, policy="max-min-fairness"):
    text = json.dumps(problem)
    return CliRunner().invoke(allocate, ["--policy", policy, "--input", "-", *options], input=text)


def listed(problem):
    """The same problem with lists of configurations."""
    problem = copy.deepcopy(problem)
    for job in problem["jobs"]:
        if "generate" in job:
            every = GangSizes(**job.pop("generate")).listed(problem["capacity"])
            job["configurations"] = [
                {"name": each.name, "gpus": each.gpus, "throughput": each.throughput} for each in every
            ]
    return problem


@pytest.mark.parametrize("policy", ELASTIC)
def test_the_answer_is_that_of_the_full_list(policy):
    """By every policy that takes configurations, on a cluster where they can be listed."""
    result, full = (run(each, "--output", "json", policy=policy) for each in (PROBLEM, listed(PROBLEM)))
    assert result.exit_code == 0, result.output
    answer, want = json.loads(result.stdout), json.loads(full.stdout)
    assert answer["objective"] == pytest.approx(want["objective"], rel=1e-6)
    assert answer["gap"] is None or answer["gap"] <= 1e-6
    if policy in GENERATES:
        # What is named has its GPUs and speed beside it, and nothing that cannot be had.
        for name in ("pipeline", "measured"):
            known = {each["name"]: each for each in answer["configurations"][name]}
            shares = answer["allocation"][name]
            assert set(shares) == set(known)
            speed = sum(known[each]["throughput"] * share for each, share in shares.items())
            assert answer["throughput"][name] == pytest.approx(speed)
    else:
        assert "configurations" not in answer


@pytest.mark.slow
def test_thousands_of_configurations_are_not_listed():
    """60,500 of two jobs: few come into question, the gap is proven over all, and the text names them."""
    result = run(LARGE, "--output", "json", policy="makespan")
    answer = json.loads(result.stdout)
    assert answer["gap"] <= 1e-6
    assert max(map(len, answer["configurations"].values())) < 100
    assert "x v100" in run(LARGE, policy="makespan").stdout


def test_a_policy_that_needs_the_list_says_so_where_it_is_too_long():
    """With the job, and the policies that do not."""
    result = run(LARGE, policy="min-cost")
    assert result.exit_code == 2
    assert "jobs[pipeline].generate: it has more than 1,000 configurations" in result.stderr
    assert "max-min-fairness, makespan" in result.stderr


@pytest.mark.parametrize("policy", ["max-min-fairness", "min-cost"])
def test_a_job_that_no_gpu_suits_waits(policy):
    """As a gang that can run nowhere: level 0."""
    problem = copy.deepcopy(PROBLEM)
    problem["jobs"][0]["generate"] |= {"sizes": [100]}
    answer = json.loads(run(problem, "--output", "json", policy=policy).stdout)
    assert answer["levels"]["pipeline"] == 0.0
    assert answer["levels"]["gang"] > 0.0


def of_job(**fields):
    problem = copy.deepcopy(PROBLEM)
    problem["jobs"][0] |= fields
    return problem


def of_generate(**fields):
    return of_job(generate={**PROBLEM["jobs"][0]["generate"], **fields})


AT = "jobs[0].generate"


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        (of_job(throughput={"v100": 1.0}), "jobs[0].throughput: generate states it"),
        (of_job(gpus=2), "jobs[0].gpus: generate states it"),
        (of_job(configurations=[]), "jobs[0].configurations: there is none"),
        (of_job(generate=None), "jobs[0].throughput: missing"),
        (of_job(generate=[]), f"{AT}: expected an object"),
        (of_job(generate={}), f"{AT}.throughput: missing"),
        (of_generate(microbatches=0), f"{AT}.microbatches: 0 is not at least 1"),
        (of_generate(microbatches=2.5), f"{AT}.microbatches: expected a whole number"),
        (of_generate(speedup={"2": 1.9}), "of microbatches and speedup both are given"),
        (of_generate(throughput={"h100": 1}), f"{AT}.throughput.h100: not one of gpu_types"),
        (of_generate(throughput={"v100": 1e300}), f"{AT}.throughput.v100: 1e+300 is not between"),
        (of_generate(sizes="all"), f"{AT}.sizes: expected a list"),
        (of_generate(sizes=[0]), f"{AT}.sizes[0]: 0 is not at least 1"),
        (of_generate(shape="2x1"), f"{AT}.shape: there is no such field"),
        (
            {**PROBLEM, "capacity": {"v100": 10**9}},
            f"{AT}.sizes: all numbers of GPUs up to 1,000,000,000 are more than 10,000",
        ),
    ],
)
def test_bad_input_is_refused_with_the_fields_name_and_exit_code_2(problem, want):
    """One line says which field, which value, and why."""
    result = run(problem)
    assert result.exit_code == 2, result.output
    assert want in result.stderr


@pytest.mark.parametrize("option", ["--agnostic", "--space-sharing"])
def test_options_of_gangs_are_refused(option):
    """With the job that they do not go with."""
    result = run(PROBLEM, option)
    assert result.exit_code == 2
    assert f"{option}: not with jobs that have generate, as pipeline" in result.stderr


def test_degrees_and_layers_are_planned_for_each_mix_of_gpus():
    """From measured layers; each configuration in question has its plan, for any policy its speed."""
    layers = {"repeat": 12, "forwardSeconds": 0.01, "backwardSeconds": 0.02, "heldBytes": 1e9}
    planned = {
        "profiles": [{"microbatchSize": 2, "layers": [layers]}],
        "speeds": {"v100": 2.5, "k80": 1.0},
        "memory_bytes": {"k80": 8e9},
        "batch_size": 32,
        "sizes": [1, 2, 4, 8],
        "most_types": 2,
    }
    problem = {**PROBLEM, "jobs": [{"name": "planned", "generate": planned}, PROBLEM["jobs"][-1]]}
    result = run(problem, "--output", "json")
    assert result.exit_code == 0, result.output
    configurations = json.loads(result.stdout)["configurations"]["planned"]
    for each in configurations:
        plan = each["plan"]
        assert sum(plan["layers"]) == 12
        assert len(plan["layers"]) * plan["tensor"] * plan["data"] == sum(each["gpus"].values())
    assert any(len(each["gpus"]) == 2 for each in configurations)
    assert run(problem, policy="fifo").exit_code == 0
    planned["speeds"]["a100"] = 4.0
    refused = run(problem)
    assert refused.exit_code == 2 and "generate.speeds.a100: not one of gpu_types" in refused.output
