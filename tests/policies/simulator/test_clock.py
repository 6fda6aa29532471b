"""The clock asks at every moment, carries decisions out, and says when nothing can happen any more."""

import pytest
from ballast_policies.rounds.values import Placement, Round
from ballast_policies.simulator.clock import ActiveJob, Answer, Clock, SimulationError

ROUND = 100.0


class Cluster:
    """One GPU a node; jobs get free ones in order of arrival, and keep them while they are there."""

    def __init__(self, *nodes):
        self.nodes = list(nodes)
        self.asked = []

    def decide(self, present, now):
        self.asked.append(now)
        held = {name: job.placement for name, job in present.items() if job.placement is not None}
        held = {name: at for name, at in held.items() if at.nodes[0] in self.nodes}
        free = [node for node in self.nodes if all(node not in at.nodes for at in held.values())]
        new = dict(zip((name for name in present if name not in held), free, strict=False))
        placements = {
            **held,
            **{name: Placement(gpu_type="v100", pool="p", nodes=(node,)) for name, node in new.items()},
        }
        return Answer(round=Round(placements=placements, reasons={}), until=ROUND * (1 + now // ROUND))


def play(cluster, *jobs, events=(), until=float("inf")):
    """Seconds at which jobs (arrival, steps) end, at 1 step/s and 5 s a start."""
    ends = {}
    arrivals = [
        (
            arrival,
            ActiveJob(
                name=f"job-{number}",
                remaining=steps,
                speed_at=lambda at: 1.0,
                restart_seconds=5.0,
                pause_seconds=1.0,
            ),
        )
        for number, (arrival, steps) in enumerate(jobs)
    ]
    Clock(
        arrivals=arrivals,
        decide=cluster.decide,
        ended=lambda job, now: ends.update({job.name: now}),
        events=events,
    ).run(until)
    return ends


def test_it_is_decided_when_jobs_come_and_go_and_when_rounds_end():
    """The second job waits for the first, whose round ends meanwhile."""
    cluster = Cluster("a")
    assert play(cluster, (0.0, 110.0), (10.0, 20.0)) == pytest.approx({"job-0": 115.0, "job-1": 140.0})
    assert {0.0, 10.0, 100.0, 115.0} <= {round(at, 3) for at in cluster.asked}


def test_a_job_whose_node_goes_is_started_elsewhere_at_that_moment():
    """It pays its start again, and keeps what it has done."""
    cluster = Cluster("a", "b")
    gone = 30.0, lambda: cluster.nodes.remove("a")
    assert play(cluster, (0.0, 60.0), events=[gone]) == pytest.approx({"job-0": 70.0})
    assert 30.0 in cluster.asked


def test_a_node_that_comes_ends_the_wait():
    """Of a job that nothing else could help."""
    cluster = Cluster()
    added = 250.0, lambda: cluster.nodes.append("a")
    assert play(cluster, (0.0, 10.0), events=[added]) == pytest.approx({"job-0": 265.0})


def test_jobs_that_wait_for_good_are_an_error():
    """Unless only a limited time is asked for."""
    with pytest.raises(SimulationError, match=r"all of 1 jobs wait, and none arrives"):
        play(Cluster(), (0.0, 10.0))
    assert play(Cluster(), (0.0, 10.0), until=1000.0) == {}
