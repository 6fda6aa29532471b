"""`ballast allocate` over configurations: the answer's form, and hostile input at the door."""

import copy
import json

import pytest
from ballast_operator.cli.allocate.command import allocate
from ballast_policies.allocation.registry import POLICIES
from click.testing import CliRunner

PROBLEM = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 4, "k80": 4},
    "jobs": [
        {
            "name": "elastic",
            "configurations": [
                {"name": "1", "gpus": {"v100": 1}, "throughput": 1.0},
                {"name": "2", "gpus": {"v100": 2}, "throughput": 1.8},
                {"name": "mixed", "gpus": {"v100": 4, "k80": 2}, "throughput": 3.2},
            ],
        },
        {"name": "gang", "throughput": {"v100": 2, "k80": 1}, "gpus": 2},
    ],
}
GANG_ONLY = {name for name, row in POLICIES.builtin.items() if not row.takes_configurations}


def run(problem, *options, policy="makespan"):
    text = problem if isinstance(problem, str) else json.dumps(problem)
    return CliRunner().invoke(allocate, ["--policy", policy, "--input", "-", *options], input=text)


@pytest.mark.parametrize("policy", POLICIES.builtin)
def test_every_policy_answers_by_configuration_or_says_why_not(policy):
    """Shares of an elastic job by the names of its configurations, of a gang by GPU type, as before."""
    result = run(PROBLEM, "--output", "json", policy=policy)
    if policy in GANG_ONLY:
        assert result.exit_code == 2
        assert f"jobs[elastic].configurations: {policy} places gangs of one size only" in result.stderr
        return
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert set(answer["allocation"]["elastic"]) == {"1", "2", "mixed"}
    assert set(answer["allocation"]["gang"]) == {"v100", "k80"}
    assert sum(answer["allocation"]["elastic"].values()) <= 1 + 1e-9


def test_the_text_names_the_configurations_in_use():
    """Names are printed as they are, whatever they look like to the terminal library."""
    problem = copy.deepcopy(PROBLEM)
    problem["jobs"][0]["configurations"][2]["name"] = "[red]mix[/red]"
    result = run(problem, policy="max-throughput")
    assert result.exit_code == 0, result.output
    assert "configurations" in result.stdout
    assert "[red]mix[/red]" in "".join(result.stdout.split())


def changed(**fields):
    """The problem with fields of the first configuration replaced; None removes one."""
    problem = copy.deepcopy(PROBLEM)
    first = problem["jobs"][0]["configurations"][0]
    for key, value in fields.items():
        if value is None:
            del first[key]
        else:
            first[key] = value
    return problem


def of_job(**fields):
    problem = copy.deepcopy(PROBLEM)
    problem["jobs"][0] |= fields
    return problem


AT = "jobs[0].configurations[0]"


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        (changed(throughput=-1), f"{AT}.throughput: -1.0 must be at least 0"),
        (changed(throughput="fast"), f"{AT}.throughput: expected a number"),
        (changed(throughput=1e300), f"{AT}.throughput: 1e+300 is not between"),
        (changed(throughput=1e-300), f"{AT}.throughput: 1e-300 is not between"),
        (changed(throughput=None), f"{AT}.throughput: missing"),
        (changed(gpus=None), f"{AT}.gpus: missing"),
        (changed(name=None), f"{AT}.name: missing"),
        (changed(name=""), f"{AT}.name: expected a text"),
        (changed(name="2"), "configurations: the names ['2'] are used more than once"),
        (changed(name="\ud800"), f"{AT}.name: expected text, got half of a pair"),
        (changed(gpus={}), f"{AT}.gpus: there is no GPU"),
        (changed(gpus={"v100": 0}), f"{AT}.gpus: there is no GPU"),
        (changed(gpus={"v100": -2}), f"{AT}.gpus.v100: -2 is not a whole number"),
        (changed(gpus={"v100": 1.5}), f"{AT}.gpus.v100: expected a whole number"),
        (changed(gpus={"v100": 10**18}), f"{AT}.gpus.v100: 1e+18 is not between"),
        (changed(gpus={"h100": 1}), f"{AT}.gpus.h100: not one of gpu_types"),
        (changed(gpus=4), f"{AT}.gpus: expected an object"),
        (changed(shape="2x1"), f"{AT}.shape: there is no such field"),
        (of_job(configurations=[]), "jobs[0].configurations: there is none"),
        (of_job(configurations="all"), "jobs[0].configurations: expected a list"),
        (of_job(configurations=[None]), "jobs[0].configurations[0]: expected an object"),
        (of_job(throughput={"v100": 1.0}), "jobs[0].throughput: the configurations state it"),
        (of_job(gpus=2), "jobs[0].gpus: the configurations state it"),
        (of_job(configurations=None), "jobs[0].throughput: missing"),
        (json.dumps(PROBLEM).replace("1.8", "NaN"), "NaN is no number of JSON"),
    ],
)
def test_bad_configurations_are_refused_with_the_fields_name_and_exit_code_2(problem, want):
    """One line says which field, which value, and why."""
    result = run(problem)
    assert result.exit_code == 2, result.output
    assert want in result.stderr


def test_sizes_beyond_the_cluster_are_no_error():
    """A configuration of more GPUs than there are is one that the job cannot have now."""
    answer = json.loads(run(changed(gpus={"v100": 10**9}), "--output", "json").stdout)
    assert answer["allocation"]["elastic"]["1"] == 0.0
    assert answer["status"] == "optimal"


def test_agnostic_is_refused_with_what_to_change():
    """The baseline of gangs has no counterpart for jobs that choose their size."""
    result = run(PROBLEM, "--agnostic")
    assert result.exit_code == 2
    assert "leave agnostic out" in result.stderr
