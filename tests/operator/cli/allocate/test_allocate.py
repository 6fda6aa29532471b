"""`ballast allocate` as a user calls it."""

import json

import pytest
from ballast_operator.cli.allocate.command import allocate
from ballast_policies.allocation.registry import POLICIES
from click.testing import CliRunner

PROBLEM = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 1, "k80": 1},
    "prices": {"v100": 2.48, "k80": 0.45},
    "jobs": [
        {"name": "a", "throughput": {"v100": 40, "k80": 10}, "steps_remaining": 1000},
        {"name": "b", "throughput": {"v100": 12, "k80": 4}, "steps_remaining": 1000},
        {"name": "c", "throughput": {"v100": 100, "k80": 50}, "steps_remaining": 1000},
    ],
}


def run(problem, *options, policy="max-min-fairness"):
    text = problem if isinstance(problem, str) else json.dumps(problem)
    return CliRunner().invoke(allocate, ["--policy", policy, "--input", "-", *options], input=text)


def test_the_dissertations_example_from_standard_input():
    """Objective 8/11, and the answer's keys as documented."""
    result = run(PROBLEM, "--output", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["objective"] == pytest.approx(8 / 11, rel=1e-6)
    assert set(answer) == {
        "policy",
        "objective",
        "allocation",
        "pair_allocation",
        "throughput",
        "levels",
        "status",
        "gap",
        "solve_seconds",
        "solver",
        "shadow_prices",
        "unmet_deadlines",
        "fallbacks",
    }
    assert answer["gap"] <= 1e-6


def test_pairs_that_a_policy_never_makes_are_refused():
    """Else the option would be accepted, and have no effect."""
    result = run(PROBLEM, "--space-sharing", policy="allox")
    assert result.exit_code == 2 and "--space-sharing: allox puts no two jobs" in result.output
    assert run(PROBLEM, "--space-sharing").exit_code == 0


@pytest.mark.parametrize("policy", POLICIES.builtin)
@pytest.mark.parametrize("options", [(), ("--agnostic",)])
def test_every_policy_answers_within_capacity(policy, options):
    """No job has more than its time, no GPU type gives more than it has."""
    result = run(PROBLEM, "--output", "json", *options, policy=policy)
    assert result.exit_code == 0, result.output
    shares = json.loads(result.stdout)["allocation"]
    for row in shares.values():
        assert sum(row.values()) <= 1 + 1e-6
    for gpu_type in PROBLEM["gpu_types"]:
        assert sum(row.get(gpu_type, 0.0) for row in shares.values()) <= 1 + 1e-6


@pytest.mark.parametrize("policy", POLICIES.builtin)
@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_every_policy_answers_where_jobs_state_a_name_and_speeds_only(policy, jobs):
    """All else has a default, and the answer is JSON without Infinity or NaN."""
    bare = [{"name": f"job-{i}", "throughput": {"v100": 2 + i}} for i in range(jobs)]
    problem = {"gpu_types": ["v100", "k80"], "capacity": {"v100": 1}, "jobs": bare}
    result = run(problem, "--output", "json", policy=policy)
    assert result.exit_code == 0, result.output

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert set(json.loads(result.stdout, parse_constant=refuse)["allocation"]) == {b["name"] for b in bare}


def changed(**fields):
    return PROBLEM | fields


def job(**fields):
    return changed(jobs=[{"name": "a", "throughput": {"v100": 1}} | fields])


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        ("{", "not JSON"),
        ([], "expected an object"),
        (changed(colour="blue"), "colour: there is no such field"),
        ({"gpu_types": [], "capacity": {}}, "jobs: missing"),
        (changed(capacity={"v100": 1.5}), "capacity.v100"),
        (changed(capacity={"tpu": 1}), "capacity.tpu"),
        (changed(capacity={"v100": -1, "k80": 1}), "capacity.v100"),
        (job(color=1), "jobs[0].color: there is no such field"),
        (job(gpus=0), "gpus"),
        (job(weight=-1), "weight"),
        (job(throughput={"tpu": 1}), "jobs[0].throughput.tpu"),
        (job(throughput={"v100": -1}), "throughput"),
        (job(steps_remaining=-1), "steps_remaining"),
        (job(name=""), "jobs[0].name"),
        (changed(jobs=[{"throughput": {"v100": 1}}]), "jobs[0].name: missing"),
        (changed(jobs=[PROBLEM["jobs"][0]] * 2), "'a'"),
        (changed(pairs=[{"jobs": ["a"], "throughput": {}}]), "pairs[0].jobs"),
        (job(weight=10**400), "jobs[0].weight"),
        (job(weight=1e-300), "jobs[0].weight"),
        (job(elapsed=float("inf")), "jobs[0].elapsed"),
        (job(deadline=float("nan")), "deadline"),
        (changed(capacity={"v100": 10**400}), "capacity.v100"),
        (changed(prices={"tpu": 1}), "prices.tpu"),
        (changed(gpu_types=["v100", "k80", ""]), "gpu_types[2]"),
        (changed(jobs=[{"name": 1, "throughput": {}}, {"nam": "b"}]), "jobs[1].nam: there is no such field"),
        ('{"gpu_types": [], "capacity": {}, "capacity": {}, "jobs": []}', "capacity: given twice"),
        ("[" * 100_000, "the input: nested deeper than"),
    ],
)
def test_bad_input_is_refused_with_the_fields_name_and_exit_code_2(problem, want):
    """One line says which field, which value, and why."""
    result = run(problem)
    assert result.exit_code == 2
    assert want in result.stderr


def test_input_that_is_not_text_is_refused():
    """A binary file by mistake."""
    options = ["--policy", "fifo", "--input", "-"]
    result = CliRunner().invoke(allocate, options, input=b"\xff\xfe\x00")
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    """As any other bad input."""
    result = run(PROBLEM, policy="fairest")
    assert result.exit_code == 2
    assert "max-min-fairness" in result.stderr


def test_a_deadline_that_cannot_be_kept_is_named_and_the_others_are_kept():
    """In both outputs: 1000 steps at 40 steps/s take 25 s."""
    first, second, third = PROBLEM["jobs"]
    problem = changed(jobs=[first | {"deadline": 20}, second | {"deadline": 900}, third | {"deadline": 100}])
    answer = json.loads(run(problem, "--output", "json", policy="min-cost-slo").stdout)
    assert answer["unmet_deadlines"] == ["a"]
    assert answer["throughput"]["b"] * 900 >= 1000 * (1 - 1e-9)
    assert answer["throughput"]["c"] * 100 >= 1000 * (1 - 1e-9)
    assert "deadlines that cannot be kept: a" in run(problem, policy="min-cost-slo").stdout


def test_the_text_shows_shares_and_gap():
    """The output for people has both."""
    result = run(PROBLEM)
    assert result.exit_code == 0
    assert "gap" in result.output
