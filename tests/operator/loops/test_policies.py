"""Every policy, chosen by one line of the ClusterPolicy while jobs run."""

import pytest
from ballast_operator.allocator.problem.snapshot import as_job
from ballast_operator.api.cluster_policy import CHOOSABLE
from ballast_operator.api.conditions import JobReason, PolicyReason
from ballast_operator.kube.kinds import POLICY

from tests.operator.loops.simulated.simulation import (
    NAMESPACE,
    START,
    Simulation,
    at,
    fast_and_slow,
    throughput,
)

LONG = {"totalSteps": 100_000}


@pytest.mark.slow
async def test_all_policies_one_after_the_other_under_running_jobs():
    """Each decides at once, says what it has reached, and moves no job within the round."""
    simulation = fast_and_slow(roundSeconds=3600)
    simulation.add_job("one", stages=(2, 2), throughput=throughput(fast=4, slow=1), **LONG)
    simulation.add_job(
        "two", stages=(1, 1), throughput=throughput(1, fast=2, slow=1), entity="vision", **LONG
    )
    simulation.add_job("three", stages=(1, 1), deadline="2026-01-02T00:00:00Z", **LONG)
    await simulation.running("one", "two", "three")
    for policy in CHOOSABLE:
        simulation.change_policy(objective={"policy": policy})
        await simulation.tick()
        status = simulation.policy()["status"]
        assert status["lastRound"]["policy"] == policy
        assert {"solveSeconds", "objectiveValue"} <= status["lastRound"].keys()
        assert simulation.policy_condition("Solved")["reason"] == PolicyReason.OPTIMAL
        assert simulation.policy_condition("Ready")["message"].endswith(f"by {policy}")
        if policy == "min-cost-slo":
            assert (
                "pricePerGpuHour: none for fast, slow"
                in simulation.policy_condition("InputsComplete")["message"]
            )
            assert simulation.condition("three", "OnTime").reason == JobReason.DEADLINE_WITHIN_REACH
    assert simulation.status("one").isolated
    assert [simulation.status(name).launches for name in ("one", "two", "three")] == [1, 1, 1]


async def test_a_policy_may_have_the_longest_name_of_kubernetes():
    """Its rounds are named after it, and the name of a round is no longer than that either."""
    simulation = fast_and_slow()
    item, name = simulation.policy(), ".".join(["n" * 63] * 3 + ["n" * 61])
    simulation.world.drop(POLICY, "", "default")
    simulation.world.put(POLICY, {**item, "metadata": {**item["metadata"], "name": name, "uid": "long"}})
    await simulation.run_job("one")
    assert simulation.policy_condition("Ready", name)["status"] == "True"
    assert simulation.status("one").allocation.plan_id.startswith("n" * 63 + ".")


async def test_a_missing_input_is_named_and_the_other_jobs_run():
    """A condition names job and field; with the field or another policy it is taken back."""
    simulation = fast_and_slow(
        roundSeconds=3600,
        objective={"policy": "hierarchical", "entities": {"vision": {"weight": 2}, "speech": {}}},
    )
    simulation.add_job("good", stages=(1, 1), entity="vision", **LONG)
    await simulation.run_job("stray", stages=(1, 1), entity="cooking", **LONG)
    informed = simulation.condition("stray", "InputsComplete")
    assert (informed.is_true, informed.reason) == (False, JobReason.DEFAULTS_USED)
    assert (
        "spec.entity: cooking is not one of the ClusterPolicy's entities (speech, vision)" in informed.message
    )
    assert simulation.condition("good", "InputsComplete") is None
    overall = simulation.policy_condition("InputsComplete")
    assert (overall["status"], overall["reason"]) == ("False", PolicyReason.DEFAULTS_USED)
    assert f"{NAMESPACE}/stray" in overall["message"]
    simulation.change("stray", entity="speech")
    await simulation.tick()
    informed = simulation.condition("stray", "InputsComplete")
    assert (informed.is_true, informed.reason) == (True, JobReason.COMPLETE)
    assert simulation.policy_condition("InputsComplete")["status"] == "True"


async def test_deadlines_that_cannot_be_kept_are_named_and_the_others_are_kept():
    """Over, out of reach, crowded out: each has its own word; another policy says nothing of deadlines."""
    simulation = Simulation(nodes={"a": ("fast", 1)}, roundSeconds=3600, objective={"policy": "min-cost-slo"})

    # 10 steps/s: a thousand steps take 100 s.
    rate = throughput(1, fast=10.0)
    for name, minutes, steps in (
        ("over", 0.0, 1000),
        ("far", 1.0, 6000),
        ("kept", 10.0, 5000),
        ("late", 11.0, 5000),
    ):
        simulation.add_job(
            name,
            stages=(1, 1),
            throughput=rate,
            deadline=at(60 * minutes),
            totalSteps=steps,
            trainer={"silent": True},
        )
    await simulation.tick()
    reasons = {name: simulation.condition(name, "OnTime") for name in ("over", "far", "kept", "late")}
    assert {name: (c.is_true, c.reason) for name, c in reasons.items()} == {
        "over": (False, JobReason.DEADLINE_PASSED),
        "far": (False, JobReason.DEADLINE_OUT_OF_REACH),
        "kept": (True, JobReason.DEADLINE_WITHIN_REACH),
        "late": (False, JobReason.DEADLINE_CONTENDED),
    }
    simulation.change_policy(objective={"policy": "max-min-fairness"})
    await simulation.tick()
    assert simulation.condition("late", "OnTime") is None


@pytest.mark.slow
async def test_time_that_the_owner_suspended_is_not_time_that_the_job_waited():
    """Its clock stands still in suspension, also over an operator's death."""
    simulation = fast_and_slow(objective={"policy": "finish-time-fairness"})
    await simulation.run_job("one", **LONG)
    await simulation.suspended("one")
    simulation.start_operator()
    await simulation.ticks(5, seconds=1000.0)
    simulation.change("one", suspend=False)
    await simulation.running("one")
    status = simulation.status("one")
    assert status.suspended_since is None
    assert 5000 <= status.suspended_seconds <= 5000 + 60
    (view,) = simulation.observer.jobs()
    elapsed = as_job(view, view.spec, gpus=2, rates={}, now=simulation.now).elapsed
    assert elapsed == pytest.approx((simulation.now - START).total_seconds() - status.suspended_seconds)


@pytest.mark.slow
async def test_a_policy_of_ones_own_decides_and_says_what_is_proven():
    """Named as module:function; its answer is a linear program's, certified."""
    own = "tests.policies.allocation.custom.problems:least_level"
    simulation = fast_and_slow(roundSeconds=5, objective={"policy": own})
    await simulation.run_job("one", throughput=throughput(fast=4, slow=1))
    last = simulation.policy()["status"]["lastRound"]
    assert last["policy"].endswith(":least_level") and last["gap"] == pytest.approx(0, abs=1e-6)


async def test_a_heterogeneity_agnostic_policy_is_chosen_by_one_field():
    """Blind to types it divides a job's time over them as the cluster is made up, which costs level here."""
    simulation = fast_and_slow(roundSeconds=3600)
    await simulation.run_job("one", stages=(1, 1), throughput=throughput(1, fast=4, slow=1), **LONG)
    aware = simulation.policy()["status"]["lastRound"]["objectiveValue"]
    blind = {"spec": {"objective": {"policy": "max-min-fairness", "heterogeneityAgnostic": True}}}
    simulation.world.patch(POLICY, "", "default", blind)
    await simulation.tick()
    assert simulation.policy()["status"]["lastRound"]["objectiveValue"] < 0.9 * aware
