"""What a team's jobs cost is kept, deleted jobs included, and its budget ends what its owner said it ends."""

import datetime

import pytest
from ballast_operator.api.cluster_policy_status import team_costs
from ballast_operator.kube.kinds import JOB, POLICY

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

pytestmark = pytest.mark.slow

PRICE = 36.0
PER_SECOND = 2 * PRICE / 3600


def cluster(**budgets: dict) -> Simulation:
    pools = {"fast": {"pricePerGpuHour": PRICE}}
    return Simulation(nodes={"a": ("fast", 4)}, pools=pools, roundSeconds=20, budgets=budgets)


def add(simulation: Simulation, name: str, team: str | None = "vision", **spec) -> None:
    more = {} if team is None else {"entity": team}
    simulation.add_job(name, totalSteps=100_000, **more, **spec)


def spent(simulation: Simulation) -> dict[str, float]:
    status = simulation.policy().get("status")
    return {entry.team: entry.cost for entry in team_costs(status, simulation.now)}


async def test_a_spent_budget_suspends_the_jobs_of_the_team_and_of_no_other():
    """They save first; raising it lets them resume there."""
    simulation = cluster(vision={"amount": 1.0})
    add(simulation, "one")
    add(simulation, "other", team="speech")
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    assert spent(simulation)["vision"] == pytest.approx(1.0, abs=15 * PER_SECOND)
    await simulation.refused("one", "TeamBudgetSpent", "raise budgets.vision.amount")
    assert simulation.condition("one", "BudgetExhausted").is_true
    assert "TeamBudgetSpent" in simulation.world.events
    assert simulation.status("one").lost_steps == 0
    assert simulation.trainers["one"].saved > 0
    assert simulation.state("other") == "Running"
    assert simulation.condition("other", "BudgetExhausted") is None
    await simulation.ticks(3)
    before = spent(simulation)["vision"]
    await simulation.ticks(40)
    assert spent(simulation)["vision"] == pytest.approx(before)
    simulation.change_policy(budgets={"vision": {"amount": 5.0}})
    await simulation.running("one")
    assert simulation.trainers["one"].resumed_from[-1] > 0
    assert simulation.condition("one", "BudgetExhausted") is None


async def test_deleting_jobs_brings_no_budget_back_and_neither_does_another_leader():
    """The next job of the team does not start."""
    simulation = cluster(vision={"amount": 1.0})
    add(simulation, "one")
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    simulation.world.drop(JOB, NAMESPACE, "one")
    del simulation.trainers["one"]
    simulation.start_operator()
    add(simulation, "two")
    await simulation.ticks(40)
    assert simulation.state("two") == "Suspended"
    assert simulation.status("two").launches == 0


@pytest.mark.parametrize("operator_runs", [True, False])
async def test_a_job_that_changes_its_team_is_paid_for_once(operator_runs):
    """By the old team until then, and by the new one from then on, also where no operator runs meanwhile."""
    simulation = cluster()
    add(simulation, "one")
    await simulation.running("one")
    await simulation.ticks(50)
    simulation.change("one", entity="speech")
    if not operator_runs:
        simulation.start_operator()
    before = spent(simulation)["vision"]
    await simulation.ticks(100)
    simulation.start_operator()
    await simulation.ticks(100)
    status = simulation.status("one")
    assert [part.team for part in status.team_costs] == ["vision", "speech"]
    assert sum(part.cost for part in status.team_costs) == pytest.approx(status.cost_so_far)
    costs = spent(simulation)
    assert costs["vision"] == pytest.approx(before, abs=3 * PER_SECOND)
    since = (simulation.now - max(status.cost_at, status.allocation.since)).total_seconds()
    assert sum(costs.values()) == pytest.approx(status.cost_so_far + since * PER_SECOND, abs=3 * PER_SECOND)


async def test_a_monthly_budget_begins_again_with_the_month():
    """At its first second by UTC, without a change by anybody."""
    simulation = cluster(vision={"amount": 1.0, "period": "Month"})
    add(simulation, "one")
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    assert "of this month" in simulation.condition("one", "Admitted").message
    left = (datetime.datetime(2026, 2, 1, tzinfo=datetime.UTC) - simulation.now).total_seconds()
    await simulation.tick(seconds=left - 60)
    await simulation.ticks(50)
    assert simulation.state("one") == "Suspended"
    await simulation.running("one")
    assert simulation.allocator.next_at is not None


async def test_the_budget_of_a_policy_that_is_gone_asks_for_no_decision():
    """When it would have been spent: there is nothing to decide by until another one comes."""
    simulation = cluster(vision={"amount": 2.0})
    add(simulation, "one")
    await simulation.running("one")
    await simulation.ticks(25)
    spent_at = simulation.allocator.decider.budgets_at
    simulation.world.drop(POLICY, "", "default")
    await simulation.until(lambda: simulation.now.timestamp() > spent_at, ticks=1000)
    decisions = simulation.decisions
    await simulation.ticks(10)
    assert simulation.decisions == decisions


async def test_a_budget_that_only_warns_lets_the_jobs_continue():
    """The condition says it."""
    simulation = cluster(vision={"amount": 1.0, "onExhausted": "Continue"})
    add(simulation, "one", budget=1000.0)
    await simulation.until(lambda: simulation.status("one").is_true("BudgetExhausted"))
    await simulation.ticks(50)
    assert simulation.state("one") == "Running"
    assert simulation.condition("one", "BudgetExhausted").reason == "TeamBudgetSpent"


@pytest.mark.parametrize("period", ["Total", "Month"])
async def test_the_metrics_have_costs_by_pool_team_and_kind_of_waste(period: str):
    """They agree with the statuses, as of each decision."""
    simulation = cluster(vision={"amount": 1000.0, "period": period})
    add(simulation, "one")
    await simulation.ticks(99)
    await simulation.tick(decides=True)

    def value(name: str, **labels: str) -> float:
        return simulation.metrics.registry.get_sample_value(name, labels)

    assert value("ballast_team_cost", team="vision") == pytest.approx(spent(simulation)["vision"])
    assert value("ballast_team_budget", team="vision", period=period) == 1000.0
    used = value("ballast_team_budget_spent", team="vision", period=period)
    assert used == pytest.approx(spent(simulation)["vision"])
    assert value("ballast_pool_price_per_gpu_hour", pool="fast") == PRICE
    cost, idle = value("ballast_pool_cost", pool="fast"), value("ballast_pool_idle_cost", pool="fast")
    assert cost == pytest.approx(4 * PRICE / 3600 * 99, rel=0.05)
    assert cost / 2 < idle + 0.1 < cost
    assert value("ballast_wasted_cost", kind="idle") == idle
    status = simulation.status("one")
    starting = status.condition("Running").last_transition_time - status.allocation.since
    assert value("ballast_wasted_cost", kind="startup") == pytest.approx(
        starting.total_seconds() * PER_SECOND
    )
