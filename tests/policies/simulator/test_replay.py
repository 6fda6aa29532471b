"""Recordings: played again under any policy, and the least that any could have paid."""

import dataclasses
import itertools
import math

import pytest
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Job, ProblemError
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.question import SpotLimits
from ballast_policies.rounds.values import Node
from ballast_policies.scheduling.decision import SchedulingPolicy
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.simulator.least_cost import least_cost
from ballast_policies.simulator.replay import RecordedCluster, RecordedJob, Recording, replay
from hypothesis import given
from hypothesis import strategies as st

from tests.support import simulations

HOUR = 3600.0


def cluster(gpus: dict[str, int], prices: dict[str, float], at: float = 0.0) -> RecordedCluster:
    """One node a pool; each pool has a GPU type of its own."""
    return RecordedCluster(
        at=at,
        nodes=tuple(Node(name=f"{t}-0", pool=t, gpu_type=t, gpus=n) for t, n in gpus.items() if n),
        pools=tuple(PricedPool(pool=t, gpu_type=t, price=prices[t], gpus=n) for t, n in gpus.items()),
        policy=SchedulingPolicy(objective="fifo", round_seconds=600),
    )


def job(name: str, steps: float, speeds: dict[str, float], *, gpus: int = 1, **more: object) -> RecordedJob:
    """A job that was done an hour after it came."""
    one = ClusterJob(job=Job(name=name, throughput=speeds, gpus=gpus, steps_remaining=steps))
    return RecordedJob(
        **{"one": one, "arrival": 0.0, "gone": HOUR, "done": True, "cost": 1.0, "start_seconds": 0.0, **more}
    )


def recording(jobs: list[RecordedJob], *clusters: RecordedCluster) -> Recording:
    return Recording(since=0.0, until=HOUR, clusters=clusters, jobs=tuple(jobs))


def test_pools_come_and_go_and_prices_change_as_they_did() -> None:
    """A gang whose node goes begins again on what is there; each stretch is paid at its price."""
    jobs = [job("one", 2 * HOUR, {"a": 1.0, "b": 1.0})]
    before, after = (
        cluster({"a": 1, "b": 0}, {"a": 1.0, "b": 3.0}),
        cluster({"b": 1}, {"b": 4.0}, at=HOUR / 2),
    )
    (found,) = replay(recording(jobs, before, after)).jobs
    assert (found.seconds, found.starts) == (pytest.approx(2 * HOUR), 2)
    assert found.cost == pytest.approx(0.5 * 1.0 + 1.5 * 4.0)
    gone = [dataclasses.replace(jobs[0], gone=60.0, done=False), job("two", 60, {"a": 1.0})]
    late = replay(recording(gone, before))
    assert [(one.job, one.seconds) for one in late.jobs] == [("two", pytest.approx(120))]


def test_gangs_whose_nodes_go_take_none_of_the_moves_of_the_hour() -> None:
    """Two nodes of a gang go, one after the other; the one move that there is stops the younger job."""
    prices = {"a": 1.0, "b": 1.0, "c": 1.0}
    clusters = [
        cluster(gpus, prices, at=at)
        for gpus, at in (({"a": 1, "b": 1, "c": 1}, 0.0), ({"b": 1, "c": 1}, 1000.0), ({"b": 1}, 2000.0))
    ]
    limited = [
        dataclasses.replace(each, policy=dataclasses.replace(each.policy, max_moves_per_hour=1))
        for each in clusters
    ]
    older = job("older", 2 * HOUR, {"a": 4.0, "b": 1.0, "c": 2.0})
    younger = job("younger", HOUR, {"b": 1.0})
    found = {one.job: one for one in replay(recording([older, younger], *limited)).jobs}
    assert (found["older"].starts, found["younger"].starts) == (3, 2)
    assert found["older"].seconds == pytest.approx(HOUR)


def test_another_policy_decides_otherwise_on_the_same_jobs() -> None:
    """First come or shortest first; one that is unknown is refused, and nothing recorded is nothing."""
    there = cluster({"a": 1}, {"a": 1.0})
    jobs = [job("long", 3000, {"a": 1.0}), job("short", 100, {"a": 1.0})]
    took = {name: replay(recording(jobs, there), objective=name) for name in ("fifo", "shortest-job-first")}
    assert [one.seconds for one in took["fifo"].jobs] == [pytest.approx(3000), pytest.approx(3100)]
    assert took["shortest-job-first"].jobs[1].seconds == pytest.approx(100)
    assert not took["fifo"].agrees() and took["fifo"].cost_error == pytest.approx(3100 / HOUR / 2 - 1)
    with pytest.raises(ProblemError, match="luck"):
        replay(recording(jobs, there), objective="luck")
    for empty in (recording([], there), recording([])):
        assert (replay(empty).agrees(), replay(empty).time_error, least_cost(empty, by=HOUR)) == (
            None,
            None,
            0,
        )
    stuck = replay(recording([job("large", 10, {"a": 1.0}, gpus=2)], there))
    assert stuck.unfinished == ("large",) and stuck.agrees() is False


def test_a_fair_replay_counts_what_jobs_would_have_taken_on_their_shares() -> None:
    """As the simulation of a trace does, and as the operator's status has it."""
    steps, arrivals = (2000.0, 2000.0, 500.0), (0.0, 900.0, 900.0)
    jobs = [
        job(f"job-{number}", *each, arrival=at)
        for number, (*each, at) in enumerate(zip(steps, [{"a": 1.0}] * 3, arrivals, strict=True))
    ]
    replayed = replay(recording(jobs, cluster({"a": 1}, {"a": 1.0})), objective="finish-time-fairness").jobs
    simulated = simulations.simulated(
        [simulations.job(steps=each, arrival=at) for each, at in zip(steps, arrivals, strict=True)],
        {"a": 1},
        simulations.table({("a", 1): {"a": 1.0}}),
        policy="finish-time-fairness",
        round_seconds=600.0,
    )
    took = [one.completion_time for one in simulated.jobs]
    assert [one.seconds for one in replayed] == pytest.approx(took) == [3800.0, 3600.0, 800.0]


@pytest.mark.parametrize(
    ("suspended", "took", "starts"),
    [
        (((300.0, 500.0), (600.0, 700.0)), 1300, 3),
        (((0.0, 200.0),), 1200, 1),  # it came so
        (((2000.0, 3000.0),), 1000, 1),  # it is done before
        (((300.0, math.inf),), None, 1),
    ],
)
def test_a_job_is_suspended_when_it_was(
    suspended: tuple[tuple[float, float], ...], took: float | None, starts: int
) -> None:
    """Its GPUs are another's meanwhile, and it goes on with the step that it had."""
    jobs = [job("one", 1000, {"a": 1.0}, suspended=suspended), job("two", 50, {"a": 1.0})]
    one, two = replay(recording(jobs, cluster({"a": 1}, {"a": 1.0}))).jobs
    assert (one.seconds, one.starts) == (None if took is None else pytest.approx(took), starts)
    first = suspended[0][0]
    assert two.seconds == pytest.approx((first if first < 1000 else 1000) + 50)


def test_limits_of_spot_machines_hold_as_they_did() -> None:
    """A job that they keep off the spot pool starts when they are gone."""
    free = cluster({"a": 1}, {"a": 1.0}, at=600.0)
    limits = SpotLimits(pools=frozenset({"a"}), on_demand_share=0.5)
    (found,) = replay(
        recording([job("one", 100, {"a": 1.0})], dataclasses.replace(free, at=0.0, spot=limits), free)
    ).jobs
    assert found.seconds == pytest.approx(700)


SLOTS, SLOT = 3, 100.0


def cheapest_by_hand(jobs: list[RecordedJob], gpus: dict[str, int], prices: dict[str, float]) -> float:
    """All ways to give each job a pool and size, or nothing, in each of three slots."""
    best = math.inf
    ways = []
    for one in jobs:
        sizes = [(t, n, v) for t, by_size in one.one.elastic.speeds.items() for n, v in by_size.items()]
        ways.append(
            [
                course
                for course in itertools.product([None, *sizes], repeat=SLOTS)
                if sum(SLOT * way[2] for way in course if way) >= one.one.job.steps_remaining
            ]
        )
    for courses in itertools.product(*ways):
        held = [
            {t: sum(c[s][1] for c in courses if c[s] and c[s][0] == t) for t in gpus} for s in range(SLOTS)
        ]
        if all(slot[t] <= gpus[t] for slot in held for t in gpus):
            best = min(best, sum(slot[t] * prices[t] * SLOT / HOUR for slot in held for t in gpus))
    return best


@pytest.mark.slow
@given(data=st.data())
def test_no_schedule_is_cheaper_than_the_bound(data: st.DataObject) -> None:
    """Of all schedules of small instances; with all the time each job waits for the cheapest GPU."""
    gpus = {t: data.draw(st.integers(1, 2)) for t in ("a", "b")}
    prices = {t: data.draw(st.sampled_from([0.5, 1.0, 3.0])) for t in gpus}
    speed = st.sampled_from([0.5, 1.0, 1.5, 2.0])
    jobs = []
    for number in range(data.draw(st.integers(1, 2))):
        speeds = {t: {n: data.draw(speed) * n**0.8 for n in (1, 2)} for t in gpus}
        steps = data.draw(st.sampled_from([50.0, 150.0, 300.0]))
        job_ = Job(
            name=f"job-{number}", throughput={t: v[1] for t, v in speeds.items()}, steps_remaining=steps
        )
        jobs.append(job("", 1, {}, one=ClusterJob(job=job_, elastic=ElasticGang(speeds=speeds))))
    seen = recording(jobs, cluster(gpus, prices))
    best = cheapest_by_hand(jobs, gpus, prices)
    bound = least_cost(seen, by=SLOTS * SLOT)
    assert least_cost(seen) <= bound * (1 + 1e-9) and (bound <= best * (1 + 1e-6) or math.isinf(best))


def test_the_bound_is_reached_where_gpus_are_scarce() -> None:
    """Two jobs of an hour: one has the cheap GPU, the other pays for the dear one, unless it may wait."""
    jobs = [job(name, HOUR, {"a": 1.0, "b": 1.0}) for name in ("one", "two")]
    seen = recording(jobs, cluster({"a": 1, "b": 1}, {"a": 1.0, "b": 3.0}))
    assert least_cost(seen, by=HOUR) == pytest.approx(4.0)
    assert least_cost(seen, by=2 * HOUR) == pytest.approx(2.0) == least_cost(seen)
    assert least_cost(seen, by=HOUR / 2) == math.inf
    closed = dataclasses.replace(jobs[1].one, closed_pools=frozenset("a"))
    seen = dataclasses.replace(seen, jobs=(jobs[0], dataclasses.replace(jobs[1], one=closed)))
    assert least_cost(seen) == pytest.approx(4.0)
