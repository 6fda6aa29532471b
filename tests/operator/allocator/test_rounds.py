"""The allocator's rounds: what is granted stands until the round ends, and rounds keep to their grid."""

import dataclasses

from ballast_operator.allocator.problem.capacity import Capacity
from ballast_operator.allocator.problem.jobs.snapshot_job import SnapshotJob
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.allocator.rounds import Rounds
from ballast_operator.api.read import read_cluster_policy
from ballast_policies.allocation.problem import Allocation, Job
from ballast_policies.rounds import Node, Placement

ROUND = 60
BEGIN = 1000.0


def policy(**moves):
    return read_cluster_policy(
        {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "ClusterPolicy",
            "metadata": {"name": "p"},
            "spec": {
                "roundSeconds": ROUND,
                "moves": {"maxMovesPerHour": 100, **moves},
                "nodePools": [{"name": "a", "gpuType": "v100", "nodeSelector": {"x": "y"}}],
            },
        }
    )


def snapshot(sizes, *, running=(), launches=None, gpus=2):
    """Jobs by size on one node; ``running`` ones hold it."""
    nodes = (Node(name="n", pool="a", gpu_type="v100", gpus=gpus),)
    return Snapshot(
        capacity=Capacity(gpu_types=("v100",), nodes=nodes, members={"a": ("n",)}),
        jobs=tuple(
            SnapshotJob(
                key=("ns", job),
                job=Job(name=job, gpus=size, throughput={"v100": 1.0}),
                launches=(launches or {}).get(job, 0),
                placement=at(size) if job in running else None,
                running_since=BEGIN,
            )
            for job, size in sizes.items()
        ),
    )


def at(size):
    return Placement(gpu_type="v100", pool="a", nodes=("n",) * size)


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


def placed(rounds, moment, shot, **by_job):
    decided = rounds.decide(policy(), shot, shares(**by_job), moment=moment)
    return set(decided.placements)


def test_within_a_round_no_running_job_is_moved_however_long_it_has_run():
    """An arrival that is more urgent waits for the round's end, and gets the GPUs then."""
    rounds = Rounds()
    old = snapshot({"old": 2}, running=["old"], launches={"old": 1})
    both = snapshot({"old": 2, "new": 2}, running=["old"], launches={"old": 1})
    placed(rounds, BEGIN, old, old=1.0)
    assert placed(rounds, BEGIN + ROUND, old, old=1.0) == {"old"}
    assert placed(rounds, BEGIN + 1.9 * ROUND, both, old=0.01, new=0.99) == {"old"}
    assert placed(rounds, BEGIN + 2 * ROUND, both, old=0.01, new=0.99) == {"new"}


def test_what_a_rounds_end_has_granted_stands_while_the_gpus_are_on_their_way():
    """The gang that is told to go does not get them back because others' claims have changed by then."""
    rounds = Rounds()
    running = snapshot({"old": 2, "new": 2}, running=["old"], launches={"old": 1})
    gone = snapshot({"old": 2, "new": 2}, launches={"old": 1})
    placed(rounds, BEGIN, running, old=0.5, new=0.5)
    assert placed(rounds, BEGIN + ROUND, running, old=0.01, new=0.99) == {"new"}
    assert placed(rounds, BEGIN + ROUND + 1, running, old=0.99, new=0.01) == {"new"}
    assert placed(rounds, BEGIN + ROUND + 2, gone, old=0.99, new=0.01) == {"new"}


def test_a_grant_holds_for_one_launch():
    """A launch that has failed since has to win its GPUs again."""
    rounds = Rounds()
    waiting = snapshot({"first": 2, "second": 2})
    failed = snapshot({"first": 2, "second": 2}, launches={"first": 1})
    assert placed(rounds, BEGIN, waiting, first=1.0, second=0.0) == {"first"}
    assert placed(rounds, BEGIN + 1, waiting, first=0.0, second=1.0) == {"first"}
    assert placed(rounds, BEGIN + 2, failed, first=0.0, second=1.0) == {"second"}


def test_a_grant_ends_with_its_job_or_its_node():
    """No job waits for one that is gone, and none is placed where there is no room."""
    rounds = Rounds()
    waiting = snapshot({"first": 2, "second": 1})
    assert placed(rounds, BEGIN, waiting, first=1.0, second=0.0) == {"first"}
    assert placed(rounds, BEGIN + 1, snapshot({"second": 1}), second=0.0) == {"second"}
    rounds = Rounds()
    assert placed(rounds, BEGIN, waiting, first=1.0, second=0.0) == {"first"}
    assert (
        placed(
            rounds,
            BEGIN + 1,
            dataclasses.replace(waiting, capacity=Capacity(gpu_types=("v100",))),
            first=1.0,
            second=0.0,
        )
        == set()
    )


def test_a_late_decision_does_not_put_off_the_rounds_after_it():
    """Rounds end on a grid; after a long silence the next one is still on it."""
    rounds = Rounds()
    shot = snapshot({"job": 1})
    placed(rounds, BEGIN, shot, job=1.0)
    placed(rounds, BEGIN + ROUND + 7, shot, job=1.0)
    assert rounds.next_at == BEGIN + 2 * ROUND
    placed(rounds, BEGIN + 5.5 * ROUND, shot, job=1.0)
    assert rounds.next_at == BEGIN + 6 * ROUND


def test_what_comes_free_within_a_round_is_kept_only_if_its_end_may_not_stop_the_rest():
    """With moves to spare a small gang takes the free GPU at once; without, it is kept for the large one."""
    busy = snapshot({"small": 1, "large": 3, "next": 1}, running=["small"], launches={"small": 1}, gpus=3)
    wants = shares(small=0.2, large=0.7, next=0.1)
    for limit, expected in ((100, {"small", "next"}), (0, {"small"})):
        rounds = Rounds()
        decided = rounds.decide(policy(maxMovesPerHour=limit), busy, wants, moment=BEGIN)
        assert set(decided.placements) == expected, limit


def test_within_a_round_a_job_is_told_what_it_was_told_when_it_got_its_gpus():
    """Its share and what it has had, not that it continues; a job that arrives in the round gets its own."""
    rounds = Rounds()
    old = snapshot({"old": 1})
    begun = rounds.decide(policy(), old, shares(old=0.8), moment=BEGIN)
    both = snapshot({"old": 1, "new": 1}, running=["old"], launches={"old": 1})
    within = rounds.decide(policy(), both, shares(old=0.4, new=0.6), moment=BEGIN + 5)
    assert "share there is 80%" in begun.reasons["old"]
    assert within.reasons["old"] == begun.reasons["old"]
    assert "share there is 60%" in within.reasons["new"]
    next_round = rounds.decide(policy(), both, shares(old=0.4, new=0.6), moment=BEGIN + ROUND)
    assert "share there is 40%" in next_round.reasons["old"]
