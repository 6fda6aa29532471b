"""Gangs on nodes: those that do not fit one, or are spread, run at the speed that was measured for that."""

import numpy as np
import pytest
from ballast_lab.arrays.by_shares import Grant
from ballast_lab.arrays.nodes import Nodes
from ballast_policies.simulator.engine import node_sizes
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.settings import SettingsError, SimulatedCluster
from ballast_policies.simulator.workloads import TraceJob
from ballast_policies.throughput.table import JobType, built_in_table

from tests.support.simulations import simulated

TABLE = built_in_table("simulation")
GANG = JobType(name="ResNet-18 (batch size 16)", gpus=2)
SINGLE = JobType(name="ResNet-18 (batch size 16)", gpus=1)
TOGETHER, APART = TABLE.alone(GANG, "v100"), TABLE.spread(GANG, "v100")


def run(*jobs, per_node, gpus=4, **settings):
    return simulated(jobs, {"v100": gpus}, TABLE, per_node=per_node, **settings)


def grant(*jobs):
    rows = np.array(jobs)
    return Grant(job=rows, partner=np.full(len(rows), -1), column=np.zeros(len(rows), dtype=np.int64))


def test_the_table_has_both_speeds():
    """Spread over nodes the gang of these tests is less than half as fast."""
    assert APART < 0.5 * TOGETHER
    assert TABLE.spread(GANG, "a100") is None


@pytest.mark.parametrize(
    ("per_node", "rate"), [({}, TOGETHER), ({"v100": 2}, TOGETHER), ({"v100": 1}, APART)]
)
def test_a_gang_larger_than_a_node_runs_at_its_unconsolidated_speed(per_node, rate):
    """And one that fits, or where nodes are left out, at the consolidated one."""
    result = run(TraceJob(type=GANG, steps=1e5, arrival=0.0), per_node=per_node)
    assert result.average_completion_time == pytest.approx(1e5 / rate)
    assert result.spread_fraction == 0.0


def test_a_gang_that_finds_room_only_on_two_nodes_is_slower_until_it_is_moved():
    """Four single jobs on two nodes; one of each node ends, and a gang comes."""
    ledger = Ledger(SimulatedCluster(gpus={"v100": 4}, gpus_per_node={"v100": 2}), TABLE)
    rows = [ledger.add(TraceJob(type=SINGLE, steps=1e5, arrival=0.0)) for _ in range(4)]
    gang = ledger.add(TraceJob(type=GANG, steps=1e5, arrival=0.0))
    nodes = Nodes(ledger)
    assert not nodes.spread(grant(*rows)).any()
    first = nodes.slowdown(grant(rows[0], rows[2], gang))
    assert first.tolist() == [1.0, 1.0, pytest.approx(APART / TOGETHER)]
    # Its grant is extended where it is, also when a whole node is free.
    assert nodes.slowdown(grant(rows[0], gang))[1] == pytest.approx(APART / TOGETHER)
    # It is stopped, and starts again: packed.
    assert not nodes.spread(grant(rows[0])).any()
    assert nodes.slowdown(grant(rows[0], gang)).tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_the_time_of_spread_gangs_is_counted():
    """Three short jobs leave one GPU free on each of two nodes; the gang takes them for all of its time."""
    short, long = 100.0, 1e7
    steps = [long, short, long, short]
    jobs = [TraceJob(type=SINGLE, steps=s, arrival=0.0) for s in steps]
    result = run(*jobs, TraceJob(type=GANG, steps=1e4, arrival=60.0), per_node={"v100": 2})
    gang = result.jobs[-1]
    assert gang.completion_time == pytest.approx(1e4 / APART)
    busy = sum(sum(job.seconds_on.values()) * job.gpus for job in result.jobs)
    assert result.spread_fraction == pytest.approx(2 * gang.completion_time / busy)


ROUND = 360.0


def come_together(launch=0.0, **settings):
    """Seconds and result of a gang on both nodes, of which one is free from 200 s on."""
    ends, begun = [1e7, 100.0, 200.0 * TABLE.alone(SINGLE, "v100"), 100.0], 60.0
    jobs = [TraceJob(type=SINGLE, steps=s, arrival=0.0) for s in ends]
    gang = TraceJob(type=GANG, steps=2e5, arrival=begun)
    settings = {"round_seconds": ROUND, "launch_seconds": launch, "record_timeline": True, **settings}
    found = run(*jobs, gang, per_node={"v100": 2}, **settings)
    return found.jobs[-1].completion_time, found


@pytest.mark.slow
def test_a_spread_gang_is_brought_together_at_the_end_of_a_round():
    """It runs apart until the first round ends after one of the nodes is free for it, and then on that."""
    seconds, result = come_together()
    apart = ROUND - 60.0
    assert seconds == pytest.approx(apart + (2e5 - apart * APART) / TOGETHER)
    alone = SINGLE.gpus * result.jobs[0].completion_time + 100.0
    assert 0 < result.spread_fraction < 2 * apart / alone


@pytest.mark.slow
def test_being_brought_together_costs_a_restart():
    """The gang does no step between its stop and the first step of its new launch."""
    free, _ = come_together(launch=0.0)
    paid, _ = come_together(launch=30.0)
    # Both of its launches take 30 s, and the first one did its steps apart.
    apart = ROUND - 60.0 - 30.0
    assert paid == pytest.approx(30.0 + apart + 30.0 + (2e5 - apart * APART) / TOGETHER)
    assert paid > free


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"max_moves_per_hour": 0}, {"min_run_seconds": 1e7}])
def test_hysteresis_keeps_a_spread_gang_where_it_is(settings):
    """Where no move is left, and before it has run as long as it is to stay."""
    seconds, _ = come_together(**settings)
    assert seconds == pytest.approx(2e5 / APART)


@pytest.mark.slow
def test_one_move_is_one_of_the_hours():
    """With one allowed, it is brought together."""
    seconds, _ = come_together(max_moves_per_hour=1)
    assert seconds < 1.01 * come_together()[0]


def test_without_gangs_placement_changes_nothing_with_pairs_either():
    """Six jobs of one GPU, paired on three."""
    jobs = [TraceJob(type=SINGLE, steps=2e4, arrival=10.0 * i) for i in range(6)]
    plain = run(*jobs, per_node={}, gpus=3, space_sharing=True)
    placed = run(*jobs, per_node={"v100": 2}, gpus=3, space_sharing=True)
    assert placed.average_completion_time == plain.average_completion_time


def test_the_last_node_has_what_is_left():
    """Ten GPUs in nodes of four; none of them where there are none."""
    assert node_sizes(10, 4) == [4, 4, 2]
    assert node_sizes(0, 4) == []


@pytest.mark.parametrize(("sizes", "word"), [({"tpu": 4}, "tpu"), ({"v100": 0}, "v100=0")])
def test_impossible_nodes_are_refused(sizes, word):
    """By the option's name."""
    with pytest.raises(SettingsError, match=f"gpus_per_node: {word}"):
        SimulatedCluster(gpus={"v100": 4}, gpus_per_node=sizes)
