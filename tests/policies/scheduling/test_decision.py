"""Decisions in rounds: what is granted stands until the round ends, and rounds keep to their grid."""

import dataclasses
import random
from collections import Counter

import pytest
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Allocation, Job
from ballast_policies.prices.hazard import Hazard
from ballast_policies.protocol.observed import Action
from ballast_policies.rounds.memory import forgetting
from ballast_policies.rounds.question import SpotLimits
from ballast_policies.rounds.values import Node, Placement
from ballast_policies.scheduling.assignments import assign
from ballast_policies.scheduling.deadlines import deadline_choices
from ballast_policies.scheduling.decision import Decision, Memory, SchedulingPolicy, decide
from ballast_policies.scheduling.state import Capacity, ClusterJob, ClusterState
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.test_random_rounds import random_question
from tests.policies.scheduling.clusters import at, cluster, gang

ROUND = 60
BEGIN = 1000.0


def state(sizes, *, running=(), launches=None, gpus=2):
    """Jobs by size on one node; ``running`` ones hold it."""
    jobs = (
        gang(
            job,
            size,
            runs=at(*"n" * size) if job in running else None,
            launches=(launches or {}).get(job, 0),
            running_since=BEGIN,
        )
        for job, size in sizes.items()
    )
    return cluster(*jobs, gpus=gpus)


class Rounds:
    """Decisions, one after the other, with shares that are given."""

    def __init__(self, **policy):
        self.memory = Memory()
        given = {"objective": "max-min-fairness", "max_moves_per_hour": 100, **policy}
        self.policy = SchedulingPolicy(round_seconds=ROUND, **given)

    def decide(self, at: float, cluster: ClusterState, **by_job: float) -> Decision:
        decided = decide(cluster, self.memory, self.policy, now=at, solve=lambda *_: shares(**by_job))
        self.memory = decided.memory
        return decided

    def placed(self, at: float, cluster: ClusterState, **by_job: float) -> set[str]:
        return set(self.decide(at, cluster, **by_job).round.placements)


def shares(**by_job):
    return Allocation(
        policy="max-min-fairness",
        objective=0.0,
        allocation={job: {"v100": share} for job, share in by_job.items()},
        pair_allocation={},
        throughput={},
        levels={},
        status="optimal",
        gap=0.0,
        solve_seconds=0.0,
        solver="",
    )


def test_within_a_round_no_running_job_is_moved_however_long_it_has_run():
    """An arrival that is more urgent waits for the round's end, and gets the GPUs then."""
    rounds = Rounds()
    old = state({"old": 2}, running=["old"], launches={"old": 1})
    both = state({"old": 2, "new": 2}, running=["old"], launches={"old": 1})
    rounds.placed(BEGIN, old, old=1.0)
    assert rounds.placed(BEGIN + ROUND, old, old=1.0) == {"old"}
    assert rounds.placed(BEGIN + 1.9 * ROUND, both, old=0.01, new=0.99) == {"old"}
    assert rounds.placed(BEGIN + 2 * ROUND, both, old=0.01, new=0.99) == {"new"}


def test_what_a_rounds_end_has_granted_stands_while_the_gpus_are_on_their_way():
    """The gang that is told to go does not get them back because others' claims have changed by then."""
    rounds = Rounds()
    running = state({"old": 2, "new": 2}, running=["old"], launches={"old": 1})
    gone = state({"old": 2, "new": 2}, launches={"old": 1})
    rounds.placed(BEGIN, running, old=0.5, new=0.5)
    assert rounds.placed(BEGIN + ROUND, running, old=0.01, new=0.99) == {"new"}
    assert rounds.placed(BEGIN + ROUND + 1, running, old=0.99, new=0.01) == {"new"}
    assert rounds.placed(BEGIN + ROUND + 2, gone, old=0.99, new=0.01) == {"new"}


def test_a_grant_holds_for_one_launch():
    """A launch that has failed since has to win its GPUs again."""
    rounds = Rounds()
    waiting = state({"first": 2, "second": 2})
    failed = state({"first": 2, "second": 2}, launches={"first": 1})
    assert rounds.placed(BEGIN, waiting, first=1.0, second=0.0) == {"first"}
    assert rounds.placed(BEGIN + 1, waiting, first=0.0, second=1.0) == {"first"}
    assert rounds.placed(BEGIN + 2, failed, first=0.0, second=1.0) == {"second"}


def test_a_grant_ends_with_its_job_or_its_node():
    """No job waits for one that is gone, and none is placed where there is no room."""
    rounds = Rounds()
    waiting = state({"first": 2, "second": 1})
    assert rounds.placed(BEGIN, waiting, first=1.0, second=0.0) == {"first"}
    assert rounds.placed(BEGIN + 1, state({"second": 1}), second=0.0) == {"second"}
    rounds = Rounds()
    assert rounds.placed(BEGIN, waiting, first=1.0, second=0.0) == {"first"}
    assert (
        rounds.placed(
            BEGIN + 1,
            dataclasses.replace(waiting, capacity=Capacity(gpu_types=("v100",))),
            first=1.0,
            second=0.0,
        )
        == set()
    )


def test_a_late_decision_does_not_put_off_the_rounds_after_it():
    """Rounds end on a grid, after a long silence too; one that has become shorter ends sooner."""
    rounds = Rounds()
    shot = state({"job": 1})
    rounds.placed(BEGIN, shot, job=1.0)
    rounds.placed(BEGIN + ROUND + 7, shot, job=1.0)
    assert rounds.memory.next_at == BEGIN + 2 * ROUND
    rounds.placed(BEGIN + 5.5 * ROUND, shot, job=1.0)
    assert rounds.memory.next_at == BEGIN + 6 * ROUND
    rounds.policy = dataclasses.replace(rounds.policy, round_seconds=10)
    rounds.placed(BEGIN + 5.6 * ROUND, shot, job=1.0)
    assert rounds.memory.next_at == BEGIN + 5.6 * ROUND + 10


def test_what_comes_free_within_a_round_is_kept_only_if_its_end_may_not_stop_the_rest():
    """With moves to spare a small gang takes the free GPU at once; without, it is kept for the large one."""
    busy = state({"small": 1, "large": 3, "next": 1}, running=["small"], launches={"small": 1}, gpus=3)
    wants = {"small": 0.2, "large": 0.7, "next": 0.1}
    for limit, expected in ((100, {"small", "next"}), (0, {"small"})):
        assert Rounds(max_moves_per_hour=limit).placed(BEGIN, busy, **wants) == expected, limit


def test_a_gang_whose_node_is_gone_is_no_move_that_later_rounds_count():
    """One that the round stops is."""
    rounds = Rounds(max_moves_per_hour=1)
    held = state({"old": 2}, running=["old"], launches={"old": 1})
    elsewhere = Node(name="other", pool="a", gpu_type="v100", gpus=2)
    gone = dataclasses.replace(held, capacity=dataclasses.replace(held.capacity, nodes=(elsewhere,)))
    rounds.placed(BEGIN, held, old=1.0)
    moved = rounds.decide(BEGIN + ROUND, gone, old=1.0)
    assert (moved.round.moved, moved.memory.accounts.moves) == (("old",), ())
    both = state({"old": 2, "new": 2}, running=["old"], launches={"old": 1})
    stopped = rounds.decide(BEGIN + 2 * ROUND, both, old=0.01, new=0.99)
    assert (stopped.round.stopped, stopped.memory.accounts.moves) == (("old",), (BEGIN + 2 * ROUND,))


def test_within_a_round_a_job_is_told_what_it_was_told_when_it_got_its_gpus():
    """Its share and what it has had, not that it continues; a job that arrives in the round gets its own."""
    rounds = Rounds()
    old = state({"old": 1})
    begun = rounds.decide(BEGIN, old, old=0.8).round
    both = state({"old": 1, "new": 1}, running=["old"], launches={"old": 1})
    within = rounds.decide(BEGIN + 5, both, old=0.4, new=0.6).round
    assert "share there is 80%" in begun.reasons["old"]
    assert within.reasons["old"] == begun.reasons["old"]
    assert "share there is 60%" in within.reasons["new"]
    next_round = rounds.decide(BEGIN + ROUND, both, old=0.4, new=0.6).round
    assert "share there is 40%" in next_round.reasons["old"]


def test_spot_gpus_that_no_job_may_have_are_in_nobody_s_share_whenever_is_decided():
    """Half of the GPUs in use may be spot: beside two others two of four. More jobs, or no limit: others."""
    nodes = (
        Node(name="sure", pool="sure", gpu_type="v100", gpus=2),
        Node(name="spot", pool="spot", gpu_type="v100", gpus=4),
    )
    pools = tuple(PricedPool(pool=n.pool, gpu_type="v100", price=1.0, gpus=n.gpus) for n in nodes)
    jobs = state(dict.fromkeys("abcd", 1)).jobs
    limited = ClusterState(
        capacity=Capacity(gpu_types=("v100",), nodes=nodes, pools=pools),
        jobs=jobs,
        spot=SpotLimits(pools=frozenset({"spot"}), on_demand_share=0.5),
    )
    assert [pool.gpus for pool in limited.usable_pools] == [2, 2]
    assert limited.problem.capacity == {"v100": 4}
    fewer = dataclasses.replace(limited, jobs=jobs[:2])
    assert fewer.problem.capacity == {"v100": 3}
    assert dataclasses.replace(fewer, jobs=jobs).problem.capacity == {"v100": 4}
    assert dataclasses.replace(limited, spot=SpotLimits()).problem.capacity == {"v100": 6}


@pytest.mark.parametrize(("usd", "pool"), [(0.01, "west"), (1.0, "east")])
def test_a_checkpoint_that_is_dear_to_copy_stays_where_its_job_has_a_deadline(usd, pool):
    """Ten cents an hour are saved in the west, where machines last five hours: no dollar pays for itself."""
    prices = {"east": 1.0, "west": 0.9, "sure": 3.0}
    nodes = tuple(Node(name=name, pool=name, gpu_type=name, gpus=1) for name in prices)
    steps = 100_000.0
    job = Job(
        name="one", throughput=dict.fromkeys(prices, 1.0), steps_remaining=steps, deadline=4 * steps, gpus=1
    )
    one = ClusterJob(
        job=job,
        placement=Placement(gpu_type="east", pool="east", nodes=("east",)),
        usd_per_step={"west": usd / steps},
        usd_to_move={"west": usd},
    )
    cluster = ClusterState(
        capacity=Capacity(
            gpu_types=tuple(sorted(prices)),
            nodes=nodes,
            pools=tuple(PricedPool(pool=p, gpu_type=p, price=usd, gpus=1) for p, usd in prices.items()),
        ),
        jobs=(one,),
        spot=SpotLimits(pools=frozenset({"east", "west"})),
        preempted={"west": Hazard(preemptions=20, hours=100.0)},
    )
    given = dataclasses.replace(shares(), policy="min-cost-slo")
    chosen = deadline_choices(cluster, "min-cost-slo", cluster.problem, given, round_seconds=ROUND, now=1e6)
    assert chosen.shares == {"one": {pool: 1.0}}


def carried_out(rng, decided, told, state):
    """Placements some time after a decision: pods have gone, shrunk and started, or have not yet."""
    running, left = dict(state.running), Counter({node.name: node.gpus for node in state.capacity.nodes})
    for name in [name for name in running if rng.random() < 0.7]:
        if told[name].action is not Action.KEEP:
            del running[name]
        elif told[name].kept_ranks:
            running[name] = decided.round.placements[name]
    left.subtract(node for at in running.values() for node in at.nodes)
    for name, one in told.items():
        wants = (
            Counter(one.placement.nodes) if one.action is Action.PLACE and name not in running else Counter()
        )
        if wants and rng.random() < 0.7 and all(left[node] >= count for node, count in wants.items()):
            running[name] = one.placement
            left.subtract(wants)
    return running


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("taints", "pods"), ("elastic", "pods"), ("mixed",)], ids=",".join)
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(["max-min-fairness", "completion-time", "min-cost"]),
)
def test_jobs_and_the_next_decision_are_told_the_same(kinds, seed, policy):
    """Who has a grant is to be placed, who leaves does not continue, what is granted stands until the round
    ends, and a job has received each second of its gang."""
    rng, rounds = random.Random(seed), Rounds(objective=policy, max_moves_per_hour=None)
    asked, now, before = random_question(rng, kinds), BEGIN, BEGIN
    capacity = Capacity(
        gpu_types=("k80", "v100"),
        nodes=tuple(asked.nodes),
        pools=tuple(
            PricedPool(pool=pool, gpu_type=kind, price=1.0, gpus=asked.gpus[pool])
            for pool, kind in asked.types.items()
        ),
    )
    running, launches = {}, Counter()
    for _ in range(6):
        jobs = tuple(
            ClusterJob(
                job=dataclasses.replace(job, gpus=len(running[job.name].nodes))
                if job.name in running and job.name in asked.mixed
                else job,
                elastic=asked.elastic.get(job.name),
                mixed=asked.mixed.get(job.name),
                asks=asked.asks_of(job.name),
                placement=running.get(job.name),
                launches=launches[job.name],
                running_since=BEGIN,
            )
            for job in asked.jobs
        )
        state, known = ClusterState(capacity=capacity, jobs=jobs), rounds.memory
        rows = {
            job.name: {kind: rng.choice((0.0, rng.random())) for kind in capacity.gpu_types} for job in jobs
        }
        given = dataclasses.replace(shares(), policy=policy, allocation=rows)
        solve = None if asked.mixed else lambda _, given=given: given
        decided = decide(state, known, rounds.policy, now=now, solve=solve)
        told, rounds.memory = assign(state, decided), decided.memory
        grants, placements = decided.memory.grants, decided.round.placements
        assert grants.granted.keys() == {n for n, one in told.items() if one.action is Action.PLACE}
        assert grants.leaving.keys() == {n for n in running if told[n].action is not Action.KEEP}
        for name in running.keys() - grants.leaving.keys():
            one, held = told[name], running[name].nodes
            kept = [held[rank] for rank in one.kept_ranks] or list(held)
            assert Counter([*kept, *one.extra_nodes]) == Counter(placements[name].nodes)
        if decided.within_round:
            stands = {n for n, (_, at) in known.grants.granted.items() if at == launches[n]} - running.keys()
            assert stands <= placements.keys()
        if known.accounts is not None:
            seconds = now - before
            for name, had in known.accounts.received.items():
                ran, kept = name in running, forgetting(seconds, ROUND) if name in running else 1.0
                received = sum(decided.memory.accounts.received[name].values())
                assert received == pytest.approx(sum(had.values()) * kept + ran * seconds)
        there = carried_out(rng, decided, told, state)
        launches.update(there.keys() - running.keys())
        running, before, now = there, now, now + rng.choice((1.0, 20.0, 70.0, 300.0))
