"""What jobs have paid: their own sums, what deleted ones had paid, and an operator that comes back."""

import datetime
import types

import pytest
from ballast_operator.allocator.costs import bill
from ballast_operator.allocator.costs.bill import Paid, Sums, next_bill
from ballast_operator.api.cluster_policy_status import PoolBill, PoolCapacity
from ballast_operator.api.costs import TeamCost, TeamPart
from ballast_operator.api.job_allocation import PoolCost
from ballast_policies.rounds.values import PoolPart

from tests.operator.views.builders import a_pool, a_spec

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
POOLS = {"p": a_pool(3600.0)}


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


WRITTEN = PoolBill(
    pool="p", since=START, gpus=4, gpus_held=2, price_per_gpu_hour=3600.0, held_cost=20.0, cost=100.0
)
"""Of an earlier version, which wrote no part of deleted jobs."""


def job(
    uid: str,
    paid: float,
    *,
    gpus=0,
    since=0.0,
    entity: str | None = None,
    by_team=(),
    created=None,
    paid_at=None,
):
    """A job that has paid ``paid`` in the pool, and holds ``gpus`` there since."""
    held = PoolPart(pool="p", gpu_type="v100", gpus=gpus)
    allocation = types.SimpleNamespace(on_nodes_by_pool=(held,), price_part=1.0) if gpus else None
    return types.SimpleNamespace(
        uid=uid,
        created=created,
        spec=a_spec(entity=entity),
        status=types.SimpleNamespace(
            pool_costs=(PoolCost(pool="p", cost=paid),),
            team_costs=tuple(TeamPart(team=team, cost=cost) for team, cost in by_team),
            cost_so_far=paid,
            cost_at=paid_at,
            allocation=allocation,
            unpaid_since=at(since) if gpus else None,
        ),
    )


def billed(paid: Paid, before=(), then: float = 0.0, now: float = 0.0, *, gpus: int = 4, held: int = 0):
    capacity = PoolCapacity(pool="p", gpu_type="v100", nodes=1, gpus=gpus, gpus_held=held)
    return next_bill(before, at(then), at(now), pools=[POOLS["p"].pool], capacity=[capacity], paid=paid)


def test_a_new_operator_takes_on_what_the_last_one_wrote():
    """Of jobs that are there the sums are their own; the part of deleted jobs is what was written."""
    known = WRITTEN.replace(deleted_jobs_cost=8.0)
    after = Paid().next([job("a", 12.0, gpus=2, since=10)], POOLS, [known], (), at(10), at(15))
    assert after.gpus.of("p") == pytest.approx(8.0 + 12.0 + 10.0)
    # An earlier version wrote no such part: the GPUs that were held count on.
    older = Paid().next([job("a", 12.0, gpus=2, since=10)], POOLS, [WRITTEN], (), at(10), at(15))
    assert older.gpus.of("p") == pytest.approx(20.0 + 10.0)


@pytest.mark.parametrize(("paid_at", "total"), [(5, 8.0), (15, 8.0 + 12.0)])
def test_a_job_that_is_younger_than_the_bill_has_paid_in_this_life_alone(paid_at: float, total: float):
    """What it had paid before it was made is another life's, which the bill has."""
    known = WRITTEN.replace(deleted_jobs_cost=8.0, held_cost=8.0, gpus_held=0)
    made = job("a", 12.0, created=at(10), paid_at=at(paid_at))
    assert Paid().next([made], POOLS, [known], (), at(10), at(20)).gpus.of("p") == pytest.approx(total)


def test_a_job_that_was_deleted_while_no_operator_ran_has_paid():
    """The sum of the others is less than what was written: the bill does not go back."""
    written = WRITTEN.replace(deleted_jobs_cost=8.0)
    after = Paid().next([], POOLS, [written], (), at(10), at(11))
    assert after.gpus.of("p") == pytest.approx(22.0)


def test_jobs_that_ran_on_for_long_do_not_hide_a_deleted_one():
    """While no operator ran they have paid more than it had: its part is kept, and nothing else is added."""
    written = WRITTEN.replace(deleted_jobs_cost=0.0)
    team = TeamCost(team="", since=START, cost=20.0, deleted_jobs_cost=0.0, cost_per_hour=2 * 3600.0)
    kept = job("a", 8.0, gpus=1, since=9)
    after = Paid().next([kept], POOLS, [written], [team], at(10), at(110))
    assert (after.gpus.by_key["p"], after.gpus.others["p"]) == pytest.approx((109.0, 11.0 + 100.0))
    assert after.gpus.of("p") == after.teams.of("") == pytest.approx(20.0 + 2 * 100.0)


def test_a_bill_that_begins_has_nothing_of_what_jobs_paid_before():
    """Another ClusterPolicy: its bill starts from nothing."""
    first = Paid().next([job("a", 12.0)], POOLS, (), (), None, at(0))
    (entry,) = billed(first)
    assert (entry.held_cost, first.gpus.of("p")) == (0.0, 0.0)
    second = first.next([job("a", 13.0)], POOLS, [entry], (), at(0), at(10))
    assert second.gpus.of("p") == pytest.approx(1.0)


def test_a_job_that_cannot_be_read_for_a_while_has_paid_once():
    """What it had counts meanwhile, and is no deleted job's when it can be read again."""
    looks = [job("a", 12.0), types.SimpleNamespace(uid="a", key=("team", "a")), job("a", 13.0)]
    known, sums = [WRITTEN.replace(deleted_jobs_cost=8.0)], []
    paid = Paid()
    for second, look in enumerate(looks):
        paid = paid.next([look], POOLS, known, (), at(10), at(11 + second))
        sums.append(paid.gpus.of("p"))
    assert sums == pytest.approx([20.0, 20.0, 21.0])


def test_a_status_without_teams_that_goes_to_another_one_takes_nothing_there():
    """All that it has cost so far was the first team's."""
    known = [TeamCost(team=team, since=START, cost=0.0, deleted_jobs_cost=0.0) for team in ("old", "new")]
    first = Paid().next([job("a", 5.0, entity="old")], POOLS, (), known, at(0), at(1))
    second = first.next([job("a", 6.0, entity="new")], POOLS, (), known, at(0), at(2))
    assert (second.teams.of("old"), second.teams.of("new")) == pytest.approx((5.0, 1.0))


def test_a_pool_that_is_gone_costs_no_more_and_is_given_up_before_one_in_use(monkeypatch):
    """What it has cost stays, up to a number of pools."""
    gone = next_bill([WRITTEN], at(0), at(0), pools=[], capacity=[], paid=Paid())
    assert [(entry.gpus, entry.gpus_held, entry.cost) for entry in gone] == [(0, 0, 100.0)]
    (later,) = next_bill(gone, at(0), at(3600), pools=[], capacity=[], paid=Paid())
    assert later.cost == 100.0
    monkeypatch.setattr(bill, "MOST_POOLS", 1)
    used = WRITTEN.replace(pool="another")
    for before in ([used, WRITTEN], [WRITTEN, used]):
        assert [entry.pool for entry in billed(Paid(), before)] == ["p"]


@pytest.mark.parametrize(("gpus", "held", "cost"), [(4, 2, 140.0), (0, 0, 130.0), (1, 2, 130.0)])
def test_a_bill_has_what_nodes_cost_and_at_least_what_jobs_paid_there(gpus: int, held: int, cost: float):
    """Ten seconds of as many GPUs at 1 a second; jobs have paid 30 more. GPUs of lost nodes that pods hold
    count from then on."""
    before = WRITTEN.replace(gpus=gpus, gpus_held=held, deleted_jobs_cost=20.0)
    paid = Paid(gpus=Sums(others={"p": 50.0}))
    (entry,) = billed(paid, [before], 0, 10, gpus=gpus, held=held)
    assert (entry.cost, entry.held_cost) == pytest.approx((cost, 50.0))
    assert (entry.gpus, entry.gpus_held) == (max(gpus, held), held)


def test_a_team_pays_until_now_and_those_with_a_budget_or_gpus_are_kept(monkeypatch):
    """The sums were made a moment ago; of more teams than have room the cheapest others go."""
    jobs = [job("a", 8.0, gpus=2, since=0, entity="trains"), job("b", 90.0, entity="dear")]
    jobs.append(job("c", 1.0, entity="budget"))
    policy = types.SimpleNamespace(spec=types.SimpleNamespace(budgets={"budget": None}))
    paid = Paid().next(jobs, POOLS, (), (), None, at(10))
    teams = bill.next_team_costs({}, policy, paid, at(15))
    costs = {entry.team: (entry.cost, entry.month_cost, entry.cost_per_hour) for entry in teams}
    hour = 2 * 3600.0
    assert costs == {"budget": (1.0, 1.0, 0.0), "dear": (90.0, 90.0, 0.0), "trains": (38.0, 38.0, hour)}
    for most, kept in ((2, ["budget", "trains"]), (1, ["budget"])):
        monkeypatch.setattr(bill, "MOST_TEAMS", most)
        assert [entry.team for entry in bill.next_team_costs({}, policy, paid, at(15))] == kept


def test_a_job_that_changed_its_team_while_no_operator_ran_is_counted_once():
    """Its status says whose its cost is; its GPUs are the old team's until a pass has booked them."""
    known = (TeamCost(team="vision", since=START, cost=9.0, deleted_jobs_cost=4.0),)
    moved = job("a", 5.0, gpus=1, since=1, entity="speech", by_team=[("vision", 5.0)])
    first = Paid().next([moved], POOLS, (), known, at(0), at(3))
    assert (first.teams.of("vision"), first.teams.of("speech")) == (11.0, 0.0)
    moved = job("a", 8.0, gpus=1, since=4, entity="speech", by_team=[("vision", 8.0), ("speech", 0.0)])
    second = first.next([moved], POOLS, (), known, at(0), at(6))
    assert (second.teams.of("vision"), second.teams.of("speech")) == (12.0, 2.0)
    known += (TeamCost(team="speech", since=START, cost=2.0, deleted_jobs_cost=0.0),)
    gone = second.next([], POOLS, (), known, at(0), at(7))
    assert (gone.teams.of("vision"), gone.teams.of("speech")) == (12.0, 3.0)
