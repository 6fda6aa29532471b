"""A job's budget and deadline: what is said at once, and what happens when they are reached."""

import pytest
from ballast_operator.kube.kinds import EVENT, JOB
from ballast_operator.report.explanation import explain_job

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, at, throughput

SPEEDS = throughput(fast=10.0, slow=1.0)
PER_SECOND = 2 * 36.0 / 3600  # of two fast GPUs


def cluster(policy: str = "max-throughput", **nodes: int) -> Simulation:
    """Fast GPUs at 36 an hour, slow ones at 1.8: a hundred steps cost 0.2 on fast ones, 0.1 on slow ones."""
    found = nodes or {"fast": 2, "slow": 2}
    named = {f"n-{pool}": (pool, gpus) for pool, gpus in found.items()}
    prices = {"fast": 36.0, "slow": 1.8}
    pools = {pool: {"pricePerGpuHour": prices[pool]} for pool in found}
    return Simulation(nodes=named, pools=pools, roundSeconds=20, objective={"policy": policy})


def add(simulation: Simulation, steps: int = 100_000, **spec) -> None:
    simulation.add_job("one", totalSteps=steps, throughput=SPEEDS, **spec)


@pytest.mark.slow
async def test_a_spent_budget_suspends_the_job_after_a_checkpoint_and_raising_it_resumes_there():
    """With an Event; no step is lost, and what it cost is within a few seconds of the budget."""
    simulation = cluster(fast=2)
    add(simulation, budget=1.0)
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    status = simulation.status("one")
    assert 1.0 <= status.cost_so_far < 1.0 + 10 * PER_SECOND
    assert simulation.condition("one", "BudgetExhausted").is_true
    assert simulation.condition("one", "Admitted").reason == "BudgetSpent"
    assert "raise spec.budget" in simulation.condition("one", "Admitted").message
    assert "BudgetSpent" in simulation.world.events
    assert not simulation.pods("one")
    assert status.lost_steps == 0
    saved = simulation.trainers["one"].saved
    assert saved > 0
    await simulation.ticks(30)
    assert simulation.status("one").cost_so_far == status.cost_so_far
    simulation.change("one", budget=3.0)
    await simulation.running("one")
    assert simulation.trainers["one"].resumed_from == [0, saved]
    assert not simulation.condition("one", "BudgetExhausted").is_true
    assert simulation.status("one").suspended_seconds >= 30
    assert not simulation.status("one").restarts


@pytest.mark.slow
async def test_a_spent_budget_fails_the_job_for_good_where_its_owner_wants_that():
    """It saves first; raising the budget later changes nothing."""
    simulation = cluster(fast=2)
    add(simulation, budget=1.0, onBudgetExhausted="Fail")
    await simulation.until(lambda: simulation.state("one") == "Failed")
    assert simulation.trainers["one"].saved > 0
    assert simulation.condition("one", "Failed").reason == "BudgetSpent"
    assert simulation.status("one").finished_at is not None
    simulation.change("one", budget=100.0)
    await simulation.ticks(30)
    assert simulation.state("one") == "Failed"
    assert not simulation.pods("one")


@pytest.mark.slow
async def test_a_spent_budget_is_only_said_where_its_owner_wants_that():
    """The job continues."""
    simulation = cluster(fast=2)
    add(simulation, budget=1.0, onBudgetExhausted="Continue")
    await simulation.until(lambda: simulation.status("one").is_true("BudgetExhausted"))
    since = simulation.condition("one", "BudgetExhausted").last_transition_time
    await simulation.ticks(100)
    assert simulation.state("one") == "Running"
    assert simulation.status("one").cost_so_far > 2.0
    assert simulation.condition("one", "BudgetExhausted").last_transition_time == since


async def test_at_once_the_job_says_what_its_budget_and_deadline_would_need():
    """Before it has cost anything: the cheapest and the fastest GPUs, with cost and time."""
    simulation = cluster()
    add(simulation, steps=36_000, budget=10.0, deadline=at(7200))
    await simulation.tick()
    budget, deadline = (
        simulation.condition("one", "BudgetExhausted"),
        simulation.condition("one", "DeadlineAtRisk"),
    )
    assert (budget.status, budget.reason) == ("False", "BudgetTooSmall")
    # 10 h on the slow ones are 36 USD; 1 h on the fast ones is 72 USD, and only that is in time.
    assert "about 36,000" in budget.message
    assert "cost 36 and take 10 h on 2 x slow of pool slow at the cheapest" in budget.message
    assert "cost 72 and take 60 min on 2 x fast of pool fast at the cheapest before" in budget.message
    assert "raise spec.budget to about 76" in budget.message
    assert (deadline.status, deadline.reason) == ("False", "DeadlineWithinReach")
    read, listing = [], simulation.cluster.list

    async def counted(kind, **how):
        items, version = await listing(kind, **how)
        read.extend(items if kind is EVENT else [])
        return items, version

    own = simulation.world.get(JOB, NAMESPACE, "one")["metadata"]["uid"]
    for number, uid in enumerate((own, *"abcdefgh")):
        item = {"metadata": {"namespace": NAMESPACE, "name": f"e{number}"}, "reason": f"Of {uid}"}
        simulation.world.put(EVENT, {**item, "involvedObject": {"uid": uid}})
    simulation.cluster.list = counted
    found = await explain_job(simulation.cluster, NAMESPACE, "one")
    assert f"Of {own}: " in found.events
    assert {event["involvedObject"]["uid"] for event in read} == {own}  # none of the namespace's others
    assert {"BudgetTooSmall", "DeadlineWithinReach"} <= {c["reason"] for c in found.conditions}


@pytest.mark.slow
async def test_a_budget_that_is_enough_says_so_and_the_job_ends_within_it():
    """To a success that leaves no complaint."""
    simulation = cluster(fast=2)
    add(simulation, steps=600, budget=5.0, deadline=at(3600))
    await simulation.tick()
    assert simulation.condition("one", "BudgetExhausted").reason == "BudgetSufficient"
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.condition("one", "DeadlineAtRisk").reason == "DeadlineMet"
    assert not simulation.condition("one", "BudgetExhausted").is_true


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "state", "reason"),
    [
        ("Continue", "Running", "Assigned"),
        ("Suspend", "Suspended", "DeadlineMissed"),
        ("Fail", "Failed", "Finished"),
    ],
)
async def test_a_deadline_that_passes_does_what_its_owner_wants(wanted, state, reason):
    """DeadlineAtRisk is True long before, since no GPUs are fast enough."""
    simulation = cluster(fast=2)
    add(simulation, deadline=at(60), onDeadlineMissed=wanted)
    await simulation.running("one")
    assert simulation.condition("one", "DeadlineAtRisk").reason == "DeadlineOutOfReach"
    await simulation.ticks(80)
    assert simulation.state("one") == state
    assert simulation.condition("one", "Admitted").reason == reason
    assert simulation.condition("one", "DeadlineAtRisk").reason == "DeadlinePassed"
    assert "DeadlineOutOfReach" in simulation.world.events
    if wanted == "Suspend":
        assert "set a later spec.deadline" in simulation.condition("one", "Admitted").message
        simulation.change("one", deadline=at(100_000))
        await simulation.running("one")
        assert simulation.trainers["one"].resumed_from[-1] > 0


async def test_a_job_on_gpus_that_are_too_slow_for_its_deadline_is_at_risk():
    """The policy min-cost reads no deadlines; faster GPUs would keep it."""
    simulation = cluster("min-cost")
    add(simulation, steps=3600, deadline=at(400))
    await simulation.running("one")
    await simulation.until(lambda: simulation.condition("one", "DeadlineAtRisk").is_true)
    assert simulation.condition("one", "DeadlineAtRisk").reason == "DeadlineSpeedTooLow"


async def test_a_job_of_unknown_speed_or_price_is_told_what_is_missing():
    """No figure is invented."""
    simulation = cluster(fast=2)
    simulation.add_job("one", budget=5.0, deadline=at(3600))
    await simulation.tick()
    assert simulation.condition("one", "BudgetExhausted").reason == "SpeedUnknown"
    assert simulation.condition("one", "DeadlineAtRisk").reason == "SpeedUnknown"
    simulation = cluster(fast=2)
    with simulation.changed_pools() as pools:
        del pools["fast"]["pricePerGpuHour"]
    add(simulation, budget=5.0)
    await simulation.tick()
    assert simulation.condition("one", "BudgetExhausted").reason == "PriceUnknown"


@pytest.mark.slow
async def test_removing_budget_and_deadline_removes_what_they_have_done():
    """A job suspended by both runs again, and its conditions are gone."""
    simulation = cluster(fast=2)
    add(simulation, budget=0.5, deadline=at(40), onDeadlineMissed="Suspend")
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    await simulation.ticks(60)
    simulation.change("one", budget=None, deadline=None)
    await simulation.running("one")
    await simulation.ticks(3)
    assert simulation.condition("one", "BudgetExhausted") is None
    assert simulation.condition("one", "DeadlineAtRisk") is None


async def test_a_budget_of_the_least_number_never_lets_the_job_train_long():
    """The smallest budget that there is: launched at most once, and then suspended."""
    simulation = cluster(fast=2)
    add(simulation, budget=1e-300)
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    await simulation.ticks(50)
    assert simulation.status("one").launches == 1


@pytest.mark.slow
async def test_a_waiting_job_whose_deadline_passes_fails_without_ever_holding_gpus():
    """Another job has them."""
    simulation = cluster("fifo", fast=2)
    await simulation.run_job("first", totalSteps=100_000)
    add(simulation, deadline=at(60), onDeadlineMissed="Fail")
    await simulation.until(lambda: simulation.state("one") == "Failed")
    assert simulation.status("one").launches == 0
    assert simulation.state("first") == "Running"


@pytest.mark.parametrize(
    "limit",
    [
        {"activeDeadlineSeconds": 60},
        {"budget": 1.0},
        {"deadline": at(60), "onDeadlineMissed": "Fail"},
    ],
)
async def test_a_job_that_saves_at_its_limit_is_not_looked_at_without_a_pause(limit):
    """The limit has passed: the next look is due when the time to save is over."""
    simulation = cluster(fast=2)
    add(simulation, **limit)
    await simulation.running("one")
    await simulation.until(lambda: simulation.status("one").allocation.ending is not None)
    key = (NAMESPACE, "one")
    await simulation.reconciler.reconcile(key)
    assert (await simulation.reconciler.reconcile(key)).after_seconds > 1


@pytest.mark.slow
async def test_a_job_that_has_run_for_its_active_deadline_saves_and_has_failed():
    """Seconds with GPUs count, over all launches; those of a suspension do not; another job gets its GPUs."""
    simulation = cluster(fast=2)
    add(simulation, activeDeadlineSeconds=120)
    await simulation.running("one")
    await simulation.ticks(10)
    await simulation.suspended("one")
    had = simulation.status("one").active_seconds
    await simulation.ticks(100)
    assert simulation.status("one").active_seconds == had < 120
    simulation.change("one", suspend=False)
    simulation.add_job("next", totalSteps=20)
    await simulation.until(lambda: simulation.state("one") == "Failed", ticks=400)
    status = simulation.status("one")
    assert 120 <= status.active_seconds < 120 + 60
    assert status.condition("Failed").reason == "DeadlineExceeded"
    assert "spec.activeDeadlineSeconds=120" in status.condition("Failed").message
    saved = simulation.trainers["one"].saved
    assert status.progress.step == status.progress.checkpoint_step == saved == simulation.trainers["one"].step
    await simulation.until(lambda: simulation.state("next") == "Succeeded", ticks=400)
