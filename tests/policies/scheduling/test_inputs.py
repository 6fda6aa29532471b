"""What a policy needs and the cluster does not say is replaced by a default that is named."""

import pytest
from ballast_policies.allocation.policy import SpaceSharing
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Entity, Job, Problem
from ballast_policies.allocation.registry import POLICIES, allocate, find_policy
from ballast_policies.scheduling.inputs import complete, structure, values
from ballast_policies.scheduling.state import Capacity

TEAMS = {"vision": Entity(weight=2), "speech": Entity(policy="fifo"), "interns": Entity(parent="vision")}


def question(
    *jobs: Job, unmeasured: tuple[str, ...] = (), prices: dict[str, float] | None = None
) -> tuple[Problem, frozenset[str]]:
    problem = Problem(
        gpu_types=("k80", "v100"),
        capacity={"v100": 2, "k80": 2},
        jobs=jobs,
        prices={"v100": 2.0, "k80": 0.5} if prices is None else prices,
    )
    return problem, frozenset(unmeasured)


def job(name: str, **fields: object) -> Job:
    values = {"throughput": {"v100": 4.0, "k80": 1.0}, "steps_remaining": 100.0}
    return Job(name=name, **{**values, **fields})


@pytest.mark.parametrize(
    "policy",
    [name for name in POLICIES.builtin if find_policy(name).space_sharing is not SpaceSharing.ALWAYS],
)
def test_every_policy_solves_what_the_operator_passes(policy):
    """Also with a job of which nothing is known, an unknown team, no prices and a deadline that is over."""
    jobs = (
        job("a", entity="vision", deadline=1000.0, gpus=2),
        job("b", entity="cooking", elapsed=50.0, isolated_elapsed=40.0),
        job("c", throughput={"v100": 1.0, "k80": 1.0}, deadline=-5.0),
    )
    inputs = complete(policy, TEAMS, *question(*jobs, unmeasured=("c",), prices={}))
    answer = allocate(policy, inputs.problem)
    assert set(answer.allocation) == {"a", "b", "c"}
    assert sum(answer.throughput.values()) > 0


def test_a_team_that_the_policy_does_not_know_stands_beside_the_others():
    """So does a job without a team; both are named, the member of a known team is not."""
    jobs = (job("a", entity="vision"), job("b", entity="cooking"), job("c"), job("d", entity="interns"))
    inputs = complete("hierarchical", TEAMS, *question(*jobs))
    assert [found.entity for found in inputs.problem.jobs] == ["vision", None, None, "interns"]
    assert inputs.problem.entities["interns"].parent == "vision"
    assert inputs.problem.entities["speech"].policy == "fifo"
    assert set(inputs.job_defaults) == {"b", "c"}
    assert "spec.entity: cooking is not one of" in inputs.job_defaults["b"][0]
    assert "spec.entity: not set" in inputs.job_defaults["c"][0]


def test_users_of_a_team_share_it_and_who_names_none_is_told():
    """One job of one user has as much as three of another."""
    jobs = (*(job(name, entity="x", user="ann") for name in "abc"), job("d", entity="x", user="bob"))
    inputs = complete("hierarchical", {"x": Entity(by_user=True)}, *question(*jobs, job("e", entity="x")))
    levels = allocate("hierarchical", inputs.problem).levels
    assert levels["d"] == pytest.approx(3 * levels["a"], rel=0.01)
    assert set(inputs.job_defaults) == {"e"} and "spec.user: not set" in inputs.job_defaults["e"][0]


def test_without_entities_the_teams_that_jobs_name_are_equal():
    """A share for each team, whatever the number of its jobs."""
    jobs = (job("a", entity="x", gpus=1), job("b", entity="y"), job("c", entity="y"))
    inputs = complete("hierarchical", {}, *question(*jobs))
    levels = allocate("hierarchical", inputs.problem).levels
    assert inputs.job_defaults == {}
    assert levels["a"] > 1.2 * levels["b"]


def test_a_price_that_is_missing_is_the_mean_of_the_others_and_is_named():
    """One default for the types without a price; 1 where there is none at all."""
    some = complete("min-cost", {}, *question(job("a"), prices={"v100": 3.0}))
    assert some.problem.prices == {"v100": 3.0, "k80": 3.0}
    assert "none for k80; 3 counts" in some.pool_defaults[0]
    none = complete("min-cost", {}, *question(job("a"), prices={}))
    assert none.problem.prices == {"v100": 1.0, "k80": 1.0}
    assert "as no pool has a price" in none.pool_defaults[0]
    assert complete("makespan", {}, *question(job("a"), prices={})).pool_defaults == ()


def test_a_job_of_which_nothing_is_known_counts_as_fast_as_the_others():
    """By GPU: a gang of two is twice as fast; only policies that compare speeds need it."""
    jobs = (job("a", gpus=2), job("b"), job("new", gpus=2, throughput={"v100": 1.0, "k80": 1.0}))
    taken = question(*jobs, unmeasured=("new",))
    inputs = complete("makespan", {}, *taken)
    assert inputs.problem.jobs[2].throughput == pytest.approx({"v100": 6.0, "k80": 1.5})
    assert "spec.throughput: nothing given and nothing measured yet" in inputs.job_defaults["new"][0]
    assert complete("max-min-fairness", {}, *taken).job_defaults == {}
    alone = complete("makespan", {}, *question(jobs[2], unmeasured=("new",)))
    assert alone.problem.jobs[0].throughput == {"v100": 1.0, "k80": 1.0}
    assert "1 step/s on every GPU type" in alone.job_defaults["new"][0]


@pytest.mark.parametrize(
    ("policy", "field", "asked_again"),
    [
        ("max-min-fairness", "elapsed", False),
        ("fifo", "deadline", False),
        ("finish-time-fairness", "elapsed", True),
        ("finish-time-fairness", "isolated_elapsed", True),
        ("allox", "elapsed", False),
        ("min-cost-slo", "deadline", True),
        ("max-min-fairness", "steps_remaining", False),
        ("makespan", "steps_remaining", True),
        ("makespan", "budget", False),
        ("makespan-within-budget", "budget", True),
        ("min-cost", "usd_per_step", True),
    ],
)
def test_a_question_is_asked_again_only_where_the_policy_reads_what_has_changed(policy, field, asked_again):
    """Time alone makes no work for policies that do not read the clock."""
    fields = dict.fromkeys(("elapsed", "isolated_elapsed", "deadline", "budget"), 10.0)
    before, _ = question(job("a", **fields))
    other = {"v100": 500.0} if field == "usd_per_step" else 500.0
    for value in (other, None) if field in ("steps_remaining", "deadline", "budget") else (other,):
        after, _ = question(job("a", **{**fields, field: value}))
        assert (values(policy, before) != values(policy, after)) is asked_again


@pytest.mark.parametrize(
    ("fields", "later", "same"),
    [
        ({"steps_remaining": 50.0, "elapsed": 99.0}, 0.0, True),
        ({"deadline": 90.0}, 10.0, True),
        ({"deadline": 100.0}, 10.0, False),
        ({"weight": 2.0}, 0.0, False),
        ({"entity": "speech"}, 0.0, False),
        ({"gpus": 2}, 0.0, False),
        ({"throughput": {"v100": 8.0, "k80": 1.0}}, 0.0, True),
        ({"throughput": {"v100": 8.0, "k80": 0.0}}, 0.0, False),
    ],
)
def test_within_a_round_only_other_jobs_or_wishes_are_news(fields, later, same):
    """Progress and time are not; a deadline that stays where it is is not."""

    def asked(moment, **changed):
        problem, _ = question(job("a", **{"deadline": 100.0, **changed}))
        return structure("makespan", problem, frozenset(), now=moment)

    assert (asked(0.0) == asked(later, **fields)) is same


@pytest.mark.parametrize(("gpus", "k80"), [((4, 1, 3, 100), 0.2), ((0, 0, 0, 0), 0.3)])
def test_a_types_price_is_the_mean_of_its_pools_by_their_gpus(gpus, k80):
    """A pool without a price does not count, and costs as much; without GPUs all pools count alike."""
    named = zip(("a", "b", "b-spot", "b-own"), ("v100", "k80", "k80", "k80"), strict=True)
    pools = tuple(
        PricedPool(pool=name, gpu_type=gpu_type, price=price, gpus=count)
        for (name, gpu_type), price, count in zip(named, (2.0, 0.5, 0.1, 0.0), gpus, strict=True)
    )
    capacity = Capacity(gpu_types=("k80", "v100"), pools=pools)
    assert capacity.prices == pytest.approx({"v100": 2.0, "k80": k80})
    assert capacity.pool_prices == pytest.approx({"a": 2.0, "b": 0.5, "b-spot": 0.1, "b-own": k80})
