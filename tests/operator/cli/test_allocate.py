"""`ballast allocate` as a user calls it: with gangs, with configurations listed, and with those generated."""

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
    "capacity": {"v100": 1, "k80": 1},
    "prices": {"v100": 2.48, "k80": 0.45},
    "jobs": [
        {"name": "a", "throughput": {"v100": 40, "k80": 10}, "steps_remaining": 1000},
        {"name": "b", "throughput": {"v100": 12, "k80": 4}, "steps_remaining": 1000},
        {"name": "c", "throughput": {"v100": 100, "k80": 50}, "steps_remaining": 1000},
    ],
}
ELASTIC = {
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
GENERATED = {
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
LARGE = {**GENERATED, "capacity": {"v100": 200, "k80": 300}}
TAKES_CONFIGURATIONS = [name for name, row in POLICIES.builtin.items() if row.takes_configurations]


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


def of_first(problem, **fields):
    """The problem with fields of its first job replaced."""
    return {**problem, "jobs": [problem["jobs"][0] | fields, *problem["jobs"][1:]]}


def of_elastic(**fields):
    return of_first(ELASTIC, **fields)


def configured(**fields):
    """The elastic problem with fields of the first configuration replaced; None removes one."""
    first, *others = ELASTIC["jobs"][0]["configurations"]
    kept = {name: value for name, value in (first | fields).items() if value is not None}
    return of_elastic(configurations=[kept, *others])


def of_generated(**fields):
    return of_first(GENERATED, **fields)


def of_generate(**fields):
    return of_generated(generate={**GENERATED["jobs"][0]["generate"], **fields})


CONFIGURATION, GENERATE = "jobs[0].configurations[0]", "jobs[0].generate"


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
        (configured(throughput=-1), f"{CONFIGURATION}.throughput: -1.0 must be at least 0"),
        (configured(throughput="fast"), f"{CONFIGURATION}.throughput: expected a number"),
        (configured(throughput=1e300), f"{CONFIGURATION}.throughput: 1e+300 is not between"),
        (configured(throughput=1e-300), f"{CONFIGURATION}.throughput: 1e-300 is not between"),
        (configured(throughput=None), f"{CONFIGURATION}.throughput: missing"),
        (configured(gpus=None), f"{CONFIGURATION}.gpus: missing"),
        (configured(name=None), f"{CONFIGURATION}.name: missing"),
        (configured(name=""), f"{CONFIGURATION}.name: expected a text"),
        (configured(name="2"), "configurations: the names ['2'] are used more than once"),
        (configured(name="\ud800"), f"{CONFIGURATION}.name: expected text, got half of a pair"),
        (configured(gpus={}), f"{CONFIGURATION}.gpus: there is no GPU"),
        (configured(gpus={"v100": 0}), f"{CONFIGURATION}.gpus: there is no GPU"),
        (configured(gpus={"v100": -2}), f"{CONFIGURATION}.gpus.v100: -2 is not a whole number"),
        (configured(gpus={"v100": 1.5}), f"{CONFIGURATION}.gpus.v100: expected a whole number"),
        (configured(gpus={"v100": 10**18}), f"{CONFIGURATION}.gpus.v100: 1e+18 is not between"),
        (configured(gpus={"h100": 1}), f"{CONFIGURATION}.gpus.h100: not one of gpu_types"),
        (configured(gpus=4), f"{CONFIGURATION}.gpus: expected an object"),
        (configured(shape="2x1"), f"{CONFIGURATION}.shape: there is no such field"),
        (of_elastic(configurations=[]), "jobs[0].configurations: there is none"),
        (of_elastic(configurations="all"), "jobs[0].configurations: expected a list"),
        (of_elastic(configurations=[None]), "jobs[0].configurations[0]: expected an object"),
        (of_elastic(throughput={"v100": 1.0}), "jobs[0].throughput: the configurations state it"),
        (of_elastic(gpus=2), "jobs[0].gpus: the configurations state it"),
        (of_elastic(configurations=None), "jobs[0].throughput: missing"),
        (json.dumps(ELASTIC).replace("1.8", "NaN"), "NaN is no number of JSON"),
        (of_generated(throughput={"v100": 1.0}), "jobs[0].throughput: generate states it"),
        (of_generated(gpus=2), "jobs[0].gpus: generate states it"),
        (of_generated(configurations=[]), "jobs[0].configurations: there is none"),
        (of_generated(generate=None), "jobs[0].throughput: missing"),
        (of_generated(generate=[]), f"{GENERATE}: expected an object"),
        (of_generated(generate={}), f"{GENERATE}.throughput: missing"),
        (of_generate(microbatches=0), f"{GENERATE}.microbatches: 0 is not at least 1"),
        (of_generate(microbatches=2.5), f"{GENERATE}.microbatches: expected a whole number"),
        (of_generate(speedup={"2": 1.9}), "of microbatches and speedup both are given"),
        (of_generate(throughput={"h100": 1}), f"{GENERATE}.throughput.h100: not one of gpu_types"),
        (of_generate(throughput={"v100": 1e300}), f"{GENERATE}.throughput.v100: 1e+300 is not between"),
        (of_generate(sizes="all"), f"{GENERATE}.sizes: expected a list"),
        (of_generate(sizes=[0]), f"{GENERATE}.sizes[0]: 0 is not at least 1"),
        (of_generate(shape="2x1"), f"{GENERATE}.shape: there is no such field"),
        (
            {**GENERATED, "capacity": {"v100": 10**9}},
            f"{GENERATE}.sizes: all numbers of GPUs up to 1,000,000,000 are more than 10,000",
        ),
    ],
)
def test_bad_input_is_refused_with_the_fields_name_and_exit_code_2(problem, want):
    """One line says which field, which value, and why."""
    result = run(problem)
    assert result.exit_code == 2, result.output
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
    result = run(PROBLEM)
    assert result.exit_code == 0
    assert "gap" in result.output


def test_names_with_brackets_are_printed_as_they_are():
    """Of GPU types, jobs and pairs; a deadline that is not kept is named likewise."""
    jobs = [{"name": f"[/{n}]", "throughput": {"[/t]": 1}, "steps_remaining": 9, "deadline": 1} for n in "ab"]
    pairs = [{"jobs": ["[/a]", "[/b]"], "throughput": {"[/t]": [0.9, 0.9]}}]
    problem = {"gpu_types": ["[/t]"], "capacity": {"[/t]": 1}, "jobs": jobs, "pairs": pairs}
    text = run(problem, "--space-sharing").output
    assert "[/a]+[/b] share GPUs: [/t]" in text
    assert (
        "deadlines that cannot be kept: [/a], [/b]"
        in run(problem | {"pairs": []}, policy="min-cost-slo").output
    )


@pytest.mark.parametrize("policy", POLICIES.builtin)
def test_every_policy_answers_by_configuration_or_says_why_not(policy):
    """Shares of an elastic job by the names of its configurations, of a gang by GPU type, as before."""
    result = run(ELASTIC, "--output", "json", policy=policy)
    if policy not in TAKES_CONFIGURATIONS:
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
    problem = copy.deepcopy(ELASTIC)
    problem["jobs"][0]["configurations"][2]["name"] = "[red]mix[/red]"
    result = run(problem, policy="max-throughput")
    assert result.exit_code == 0, result.output
    assert "configurations" in result.stdout
    assert "[red]mix[/red]" in "".join(result.stdout.split())


def test_sizes_beyond_the_cluster_are_no_error():
    """A configuration of more GPUs than there are is one that the job cannot have now."""
    answer = json.loads(run(configured(gpus={"v100": 10**9}), "--output", "json").stdout)
    assert answer["allocation"]["elastic"]["1"] == 0.0
    assert answer["status"] == "optimal"


def test_agnostic_is_refused_with_what_to_change():
    """The baseline of gangs has no counterpart for jobs that choose their size."""
    result = run(ELASTIC, "--agnostic")
    assert result.exit_code == 2
    assert "leave agnostic out" in result.stderr


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


@pytest.mark.parametrize("policy", TAKES_CONFIGURATIONS)
def test_the_answer_is_that_of_the_full_list(policy):
    """By every policy that takes configurations, on a cluster where they can be listed."""
    result, full = (run(each, "--output", "json", policy=policy) for each in (GENERATED, listed(GENERATED)))
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
    result = run(LARGE, policy="min-cost")
    assert result.exit_code == 2
    assert "jobs[pipeline].generate: it has more than 1,000 configurations" in result.stderr
    assert "max-min-fairness, makespan" in result.stderr


@pytest.mark.parametrize("policy", ["max-min-fairness", "min-cost"])
def test_a_job_that_no_gpu_suits_waits(policy):
    """As a gang that can run nowhere: level 0."""
    problem = copy.deepcopy(GENERATED)
    problem["jobs"][0]["generate"] |= {"sizes": [100]}
    answer = json.loads(run(problem, "--output", "json", policy=policy).stdout)
    assert answer["levels"]["pipeline"] == 0.0
    assert answer["levels"]["gang"] > 0.0


@pytest.mark.parametrize("option", ["--agnostic", "--space-sharing"])
def test_options_of_gangs_are_refused(option):
    result = run(GENERATED, option)
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
    problem = {**GENERATED, "jobs": [{"name": "planned", "generate": planned}, GENERATED["jobs"][-1]]}
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
