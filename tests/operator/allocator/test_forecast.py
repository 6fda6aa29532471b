"""When jobs would start and end, from a snapshot on: by hand on small clusters."""

import dataclasses
import datetime

import ballast_operator.allocator.forecast as forecast_module
import pytest
from ballast_operator.allocator.costs.bill import BudgetLeft
from ballast_operator.allocator.forecast import HOUR, ForecastJob, forecast
from ballast_operator.allocator.problem.admission import Admitted
from ballast_operator.allocator.problem.capacity import ClusterCapacity, PoolKind
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.cluster_policy import CHOOSABLE
from ballast_operator.api.costs import BudgetPeriod, OnLimit, OnTeamLimit, TeamBudget
from ballast_operator.api.node_pool import CapacityType
from ballast_operator.api.read import read_cluster_policy
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.cli.live.whatif import LiveCluster
from ballast_operator.cli.live.whatif_over_time import OverTime, changed, over_time, with_spot_limits
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Job, ProblemError
from ballast_policies.rounds.gangs import RESTART_SECONDS, ElasticGang
from ballast_policies.rounds.memory import resize_cooldown_seconds
from ballast_policies.rounds.values import Node, Placement
from ballast_policies.scheduling.gang_room import GangMemory
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.simulator.whatif import Setup

from tests.operator.views.builders import a_spec, a_view

NOW = 1_800_000_000.0
AT = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
ROUND = 360
BY_AGE = "fifo"
NEXT_MONTH = (16 * 24 + 16) * HOUR
"""Seconds after NOW."""


def policy(name=BY_AGE):
    pool = {"name": "fast", "gpuType": "v100", "nodeSelector": {"pool": "fast"}}
    spec = {"objective": {"policy": name}, "roundSeconds": ROUND, "nodePools": [pool]}
    metadata = {"name": "one", "uid": "one", "generation": 1}
    return read_cluster_policy(
        {"apiVersion": "ballast.dev/v1alpha1", "kind": "ClusterPolicy", "metadata": metadata, "spec": spec}
    )


def job(name, *, steps, runs=False, gpus=2, elapsed=0.0, elastic=None):
    """A gang of two V100s that does 10 steps/s there."""
    placement = Placement(gpu_type="v100", pool="fast", nodes=("node-0",) * gpus)
    return ClusterJob(
        job=Job(
            name=f"team/{name}",
            throughput={"v100": 10.0},
            gpus=gpus,
            steps_remaining=float(steps),
            elapsed=elapsed,
        ),
        launches=int(runs),
        placement=placement if runs else None,
        running_since=NOW - 3600 if runs else 0.0,
        elastic=elastic,
    )


def cluster(*jobs, gpus=2, price=3.0):
    node = Node(name="node-0", pool="fast", gpu_type="v100", gpus=gpus)
    pool = PricedPool(pool="fast", gpu_type="v100", price=price, gpus=gpus)
    capacity = ClusterCapacity(gpu_types=("v100",), nodes=(node,), pools=(pool,))
    return Snapshot(capacity=capacity, jobs=jobs)


def live(snapshot):
    return LiveCluster(at=AT, policy=policy(), snapshot=snapshot, resizable=frozenset())


def forecasts(snapshot, *, hours=10.0, **how):
    found, _ = forecast(snapshot, policy(), now=NOW, seconds=hours * HOUR, **how)
    return {each.name.removeprefix("team/"): each for each in found}


def test_a_job_that_runs_ends_when_its_steps_are_done():
    """It is not started again; its GPU time is paid for from now on."""
    (found,) = forecasts(cluster(job("runs", steps=36_000, runs=True))).values()
    assert found.name == "team/runs"
    assert (found.begins, found.ends, found.starts) == (0.0, pytest.approx(HOUR), 0)
    assert (found.gpu_hours, found.cost) == (pytest.approx(2.0), pytest.approx(6.0))


def test_a_job_that_waits_starts_when_the_first_ends():
    """Within the round; its start takes the restart time."""
    snapshot = cluster(
        job("runs", steps=10_000, runs=True, elapsed=9.0), job("waits", steps=10_000, elapsed=5.0)
    )
    found = forecasts(snapshot)
    assert found["runs"].ends == pytest.approx(1000)
    assert found["waits"].begins == pytest.approx(1000, abs=0.01)
    assert found["waits"].ends == pytest.approx(2000 + RESTART_SECONDS, abs=0.01)
    assert found["waits"].starts == 1


def test_what_lies_beyond_the_time_is_left_open():
    """No end, and the cost so far."""
    found = forecasts(cluster(job("runs", steps=36_000, runs=True), job("waits", steps=1)), hours=0.5)
    assert (found["runs"].ends, found["waits"].begins, found["waits"].ends) == (None, None, None)
    assert found["runs"].cost == pytest.approx(3.0)
    assert found["waits"].gpu_hours == 0.0


@pytest.mark.parametrize(
    ("of", "most", "hours", "moments"),
    [
        ((), forecast_module.MOST_WORK, 10, 101),
        (("team/runs",), forecast_module.MOST_WORK, 10, 10),
        (("team/refused",), forecast_module.MOST_WORK, 10, 0),
        ((), 100, 0.9, 9),
    ],
    ids=["all jobs", "those that were asked about", "not decided on", "too many decisions"],
)
def test_no_more_is_decided_than_was_asked_and_can_be(monkeypatch, of, most, hours, moments):
    """What ends before its time says when."""
    monkeypatch.setattr(forecast_module, "MOST_WORK", most)
    seen = []
    snapshot = cluster(job("runs", steps=36_000, runs=True), job("waits", steps=10**9))
    _, seconds = forecast(snapshot, policy(), now=NOW, seconds=10 * HOUR, of=of, progress=seen.append)
    assert (seconds / HOUR, len(seen)) == (pytest.approx(hours), moments)
    if most == 100:
        same = Setup(policy=BY_AGE)
        with pytest.raises(ProblemError, match=r"10 h of 2 jobs .* To fix: --over-time 0.81"):
            over_time(live(snapshot), (same, same), hours=10.0)


@pytest.mark.parametrize(
    ("asked", "field", "stops"),
    [
        ({"budget": 8.0}, "budget", 0.5),
        ({"budget": 8.0, "on_budget_exhausted": OnLimit.CONTINUE}, "", None),
        ({"budget": 60.0}, "", None),
        ({"budget": 8.0, "active_deadline_seconds": 1500}, "activeDeadlineSeconds", 0.25),
        (
            {"deadline": AT + datetime.timedelta(hours=0.75), "on_deadline_missed": OnLimit.FAIL},
            "deadline",
            0.75,
        ),
        ({"deadline": AT + datetime.timedelta(hours=0.75)}, "", None),
    ],
    ids=["budget", "continues", "large budget", "first of two", "deadline", "continues after its deadline"],
)
def test_a_job_stops_at_its_limits(asked, field, stops):
    """What it has not used of its GPUs' time, others have; one that continues ends when it is done.

    It has run for ten minutes and has cost 2; its data costs as much as its GPUs, 6 an hour.
    """
    status = TrainingJobStatus(cost_so_far=2.0, active_seconds=600.0)
    view = a_view(pods=(), plan=None, status=status, key=("team", "runs"), spec=a_spec(**asked))
    memory = GangMemory(spec=view.spec, need=None, pools={}, types={})
    of_it = {"gpus": 2, "memory": memory, "sizes": (), "shrinks": False, "gpu_types": ()}
    admitted = Admitted(key=view.key, view=view, spec=view.spec, **of_it)
    runs = dataclasses.replace(job("runs", steps=36_000, runs=True), usd_per_step={"fast": 6 / 36_000})
    snapshot = cluster(runs, job("waits", steps=10_000))
    found = forecasts(dataclasses.replace(snapshot, admitted=(admitted,)))
    held = 1.0 if stops is None else stops
    assert (found["runs"].stopped_by, found["runs"].stops) == (field, stops and pytest.approx(stops * HOUR))
    assert found["runs"].cost == pytest.approx(12.0 * held)
    assert (found["runs"].ends is None) == bool(field)
    assert found["waits"].begins == pytest.approx(held * HOUR, abs=0.01)


@pytest.mark.parametrize(
    ("period", "on_exhausted", "stopped", "ends"),
    [
        (BudgetPeriod.TOTAL, OnTeamLimit.SUSPEND, ("budgets.ours", 900.0), (None, None, 1930.0)),
        (
            BudgetPeriod.MONTH,
            OnTeamLimit.SUSPEND,
            ("", None),
            (NEXT_MONTH + 2730.0, NEXT_MONTH + 3760.0, 1930.0),
        ),
        (BudgetPeriod.TOTAL, OnTeamLimit.CONTINUE, ("", None), (3600.0, 4630.0, 5660.0)),
    ],
)
def test_jobs_of_a_team_stop_while_its_budget_is_spent(period, on_exhausted, stopped, ends):
    """All of them, those that wait as well; others have their GPUs, at most until the next month begins.

    Two of the team run, each an hour's steps, and pay 12 an hour together. One waits.
    """
    budget = TeamBudget(amount=100.0, period=period, on_exhausted=on_exhausted)
    ours = [job(name, steps=36_000, runs=True, gpus=1, elapsed=9.0) for name in ("one", "two")]
    ours.append(job("three", steps=10_000, elapsed=5.0))
    admitted = []
    for one in ours:
        view = a_view(pods=(), plan=None, key=("team", one.name[5:]), spec=a_spec(entity="ours"))
        memory = GangMemory(spec=view.spec, need=None, pools={}, types={})
        of_it = {"gpus": one.job.gpus, "memory": memory, "sizes": (), "shrinks": False, "gpu_types": ()}
        admitted.append(Admitted(key=view.key, view=view, spec=view.spec, **of_it))
    snapshot = dataclasses.replace(
        cluster(*ours, job("other", steps=10_000), price=6.0),
        admitted=tuple(admitted),
        budgets={"ours": BudgetLeft(team="ours", budget=budget, left=3.0)},
    )
    found, moments = forecasts(snapshot, hours=17 * 24), []
    forecasts(snapshot, hours=17 * 24, of=("team/one", "team/three"), progress=moments.append)
    assert (len(moments) < 100) == (period is not BudgetPeriod.MONTH)
    for name in ("one", "two", "three"):
        assert (found[name].stopped_by, found[name].stops) == (stopped[0], pytest.approx(stopped[1]))
    assert [found[name].ends for name in ("two", "three", "other")] == [pytest.approx(end) for end in ends]


def test_a_job_without_a_known_speed_never_ends():
    """Its GPUs are another's."""
    stuck = job("stuck", steps=10, runs=True)
    without = dataclasses.replace(stuck, job=dataclasses.replace(stuck.job, throughput={"v100": 0.0}))
    found = forecasts(cluster(without, job("waits", steps=10)), hours=1)
    assert (found["stuck"].ends, found["stuck"].cost, found["waits"].begins) == (None, 0.0, 0.0)


def test_an_elastic_job_takes_the_gpus_that_another_leaves():
    """Live, after a pause; one that cannot change its size live keeps what it has."""
    sizes = ElasticGang(speeds={"v100": {2: 10.0, 4: 20.0}}, pause_seconds=2.0)
    snapshot = cluster(
        job("other", steps=10_000, runs=True), job("grows", steps=30_000, runs=True, elastic=sizes), gpus=4
    )
    grown, kept = forecasts(snapshot, live={"team/grows"})["grows"], forecasts(snapshot)["grows"]
    assert kept.ends == pytest.approx(3000)
    assert grown.ends == pytest.approx(1000 + 2.0 + 1000, abs=0.01)
    assert grown.starts == kept.starts == 0


def test_a_gang_settles_between_two_changes_of_its_size():
    """As in the operator: GPUs that come free ten seconds after it grew are taken when it may grow again."""
    sizes = ElasticGang(speeds={"v100": {2: 10.0, 4: 20.0, 6: 30.0}}, pause_seconds=2.0)
    snapshot = cluster(
        job("first", steps=10_000, runs=True),
        job("second", steps=10_100, runs=True),
        job("grows", steps=30_000, runs=True, elastic=sizes),
        gpus=6,
    )
    settles = resize_cooldown_seconds(2.0)
    at_four_gpus = 20.0 * (settles - 2.0)
    found = forecasts(snapshot, live={"team/grows"})["grows"]
    assert found.ends == pytest.approx(1000 + settles + 2.0 + (20_000 - at_four_gpus) / 30.0, abs=0.01)


@pytest.mark.slow
def test_every_policy_can_be_looked_ahead_with():
    """All jobs end, and GPUs are never over capacity."""
    for name in CHOOSABLE:
        snapshot = cluster(*(job(f"j{n}", steps=3600 * (n + 1), elapsed=10.0 - n) for n in range(4)), gpus=4)
        found, _ = forecast(snapshot, policy(name), now=NOW, seconds=24 * HOUR)
        assert all(each.ends is not None for each in found), name
        last = max(each.ends for each in found)
        assert sum(each.gpu_hours for each in found) <= 4 * last / HOUR + 1e-6, name


def test_a_policy_that_no_cluster_can_have_is_refused():
    """It shares GPUs in a way that rounds of the operator do not."""
    setups = Setup(policy=BY_AGE), Setup(policy="gandiva")
    with pytest.raises(ProblemError, match="--over-time: policy gandiva puts any two jobs on the same GPUs"):
        over_time(live(cluster(job("one", steps=10))), setups, hours=1.0)


def test_gpus_that_are_added_and_taken_away():
    """Added ones are a node of the pool; of those taken away, a gang that loses one holds nothing."""
    snapshot = cluster(job("runs", steps=10, runs=True), job("waits", steps=10))
    more = changed(snapshot, Setup(policy=BY_AGE, more={"v100": 3}, prices={"v100": 1.0}))
    assert [(node.pool, node.gpus) for node in more.capacity.nodes] == [("fast", 2), ("fast", 2), ("fast", 1)]
    assert [(pool.gpus, pool.price) for pool in more.capacity.pools] == [(5, 1.0)]
    assert more.problem.capacity == {"v100": 5}
    fewer = changed(snapshot, Setup(policy=BY_AGE, more={"v100": -1}))
    assert fewer.problem.capacity == {"v100": 1}
    assert dict(fewer.running) == {}
    free = changed(cluster(job("runs", steps=10, runs=True), gpus=8), Setup(policy=BY_AGE, more={"v100": -6}))
    assert list(free.running) == ["team/runs"]


def test_both_setups_side_by_side():
    """With two more GPUs no job waits; text and JSON agree."""
    snapshot = cluster(job("runs", steps=36_000, runs=True), job("waits", steps=36_000))
    setups = Setup(policy=BY_AGE), Setup(policy=BY_AGE, more={"v100": 2})
    found = over_time(live(snapshot), setups, hours=10.0)
    content = found.to_json()
    assert [row["job"] for row in content["jobs"]] == ["team/runs", "team/waits"]
    waits = content["jobs"][1]
    assert waits["before"]["begins_seconds"] == pytest.approx(HOUR, abs=0.01)
    assert waits["after"]["begins_seconds"] == 0.0
    assert content["before"]["jobs_ended"] == content["after"]["jobs_ended"] == 2
    assert content["after"]["last_end_seconds"] == pytest.approx(HOUR + RESTART_SECONDS)
    assert "2 -> 2 of 2 jobs end; cost 12.05 -> 12.05" in found.as_text()


@pytest.mark.parametrize(("stops", "said"), [(None, "later"), (900.0, "stopped")])
def test_what_is_open_is_called_later_but_of_a_job_that_its_limits_stop(stops, said):
    before = ForecastJob.of(job("a", steps=10), {}, NOW, live=False)
    before.stops = stops
    after = dataclasses.replace(before, begins=0.0, ends=1800.0, stops=None)
    found = OverTime(hours=1.0, jobs=((before, after),), left_out=())
    assert found.as_text().splitlines()[2].split() == ["team/a", said, "0.00", "h", said, "0.50", "h"]
    assert found.to_json()["before"]["mean_end_seconds"] is None
    assert found.to_json()["jobs"][0]["before"]["stops_seconds"] == stops


def test_limits_of_spot_machines_hold_for_those_under_which_is_asked():
    """Half of the GPUs in use must not be spot: a job that can use no others does not start."""
    nodes = (
        Node(name="node-0", pool="fast", gpu_type="v100", gpus=2),
        Node(name="node-1", pool="own", gpu_type="k80", gpus=2),
    )
    pools = (
        PricedPool(pool="fast", gpu_type="v100", price=1.0, gpus=2),
        PricedPool(pool="own", gpu_type="k80", price=1.0, gpus=2),
    )
    capacity = ClusterCapacity(
        gpu_types=("k80", "v100"),
        nodes=nodes,
        pools=pools,
        kinds={"fast": PoolKind(capacity_type=CapacityType.SPOT), "own": PoolKind()},
    )
    snapshot = Snapshot(capacity=capacity, jobs=(job("waits", steps=10),))
    same = Setup(policy=BY_AGE)
    then = with_spot_limits(policy(), "onDemandShare=0.5")
    found = over_time(live(snapshot), (same, same), hours=10.0, then=then)
    (row,) = found.to_json()["jobs"]
    assert (row["before"]["begins_seconds"], row["after"]["begins_seconds"]) == (0.0, None)
