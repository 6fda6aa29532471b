"""A straggling rank of a pipeline gets as many layers as it computes in time, and gets them back."""

import json
import math

import pytest
import torch
from ballast_policies.contract.limits import MOST_SLOW_RANKS
from ballast_policies.contract.messages import Report
from ballast_policies.planning.launch import partition_of, stages_over
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.loop.replanning import best_step_seconds, repack_proposal
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.rank_speeds import RankSpeeds, SpeedProbe

from tests.support.plans import local_plan
from tests.trainer.loop.test_rebalance import LAYERS, SIZES, add_step, decided, job, monitor_of, run_of

COST = 0.3
"""Of each layer on a rank at full speed."""


def measure(training, slowness):
    """Eight steps as its ranks would measure them under the partition in force."""
    training.profile.forget()
    partition = partition_of(training.stages)
    layers = [COST * slowness[partition.rank_of(layer)] for layer in range(LAYERS)]
    for _ in range(8):
        add_step(training.profile, layers)
        training.rank_speeds.add([0.001 * factor for factor in slowness])


def follow(training, slowness):
    """Measure and decide until nothing moves; returns the partitions it went through."""
    seen = [partition_of(training.stages).bounds]
    for _ in range(6):
        measure(training, slowness)
        decision = decided(training)
        if not decision.rebalance:
            break
        training.stages = stages_over(decision.partition, tuple(range(decision.partition.ranks)))
        seen.append(decision.partition.bounds)
    return seen


@pytest.mark.parametrize("chi", [1.5, 2.0, 3.0])
def test_one_move_is_enough_for_a_straggler_and_one_when_it_recovers(chi):
    """Costs and speeds apart, the first decision is right: nothing moves to and fro."""
    training = job((0, 4, 8), minGain=0.02)
    there = follow(training, [1.0, chi])
    assert len(there) == 2
    fewest = min(max(8 - held, held * chi) for held in range(1, 8))
    assert max(there[1][1], (8 - there[1][1]) * chi) == fewest
    back = follow(training, [1.0, 1.0])
    assert back[-1] == (0, 4, 8) and len(back) == 2


def test_the_prediction_knows_what_a_layer_costs_elsewhere():
    """A layer that leaves the slow rank is predicted at its cost on the fast one."""
    training = job((0, 2, 4, 6, 8), minGain=0.02)
    measure(training, [1.0, 2.0, 1.0, 1.0])
    decision = decided(training)
    loads = decision.partition.loads([COST] * LAYERS, [1.0, 0.5, 1.0, 1.0])
    assert decision.step_seconds_after == pytest.approx(3 / 4 * loads.max() + loads.sum() / 4)


@pytest.mark.parametrize(
    ("slowness", "reference", "kept", "bounds"),
    [
        ([1.0, 3.0, 1.0, 3.0], 1.4, ("rank-0", "rank-2"), (0, 4, 8)),
        ([3.0, 3.0, 1.0, 1.0], 2.1, ("rank-0", "rank-2"), (0, 2, 8)),
        ([1.0, 3.0, 3.0, 3.0], 1.4, None, None),
    ],
)
def test_a_repack_keeps_the_ranks_that_are_fast(slowness, reference, kept, bounds):
    """By each layer's cost there; none is offered where the ranks left would be too slow by that."""
    training = job((0, 2, 4, 6, 8), repack={"targetStages": 2, "maxSlowdown": 0.1})
    measure(training, slowness)
    offered = repack_proposal(training, run_of(training), SIZES, reference_step_seconds=reference)
    assert (offered and offered.kept_pods) == kept
    assert (offered and partition_of(offered.stages).bounds) == bounds


def test_a_repack_has_to_keep_the_speed_of_the_ranks_as_they_are():
    """Three layers on each fast rank and one on each slow one take 0.9 s there."""
    training = job((0, 2, 4, 6, 8))
    measure(training, [1.0, 3.0, 1.0, 3.0])
    seconds = best_step_seconds(training, training.profile.costs())
    assert seconds == pytest.approx((3 * 0.9 + 4 * 0.9) / 4)


def test_ranks_that_differ_by_noise_count_as_alike():
    """Up to a quarter; above it the slow one's speed is known, also of a single step that was disturbed."""
    speeds = RankSpeeds()
    assert speeds.speeds() is None
    for step in range(8):
        speeds.add([0.001, 0.00115, 0.001 if step != 3 else 0.9])
    assert speeds.speeds() is None
    for _ in range(8):
        speeds.add([0.001, 0.002, 0.001])
    assert speeds.speeds() == (1.0, 0.5, 1.0)
    speeds.add([0.0, 0.0, 0.0])
    assert speeds.speeds() == (1.0, 0.5, 1.0), "a step that was not measured changes nothing"
    speeds.forget()
    assert speeds.speeds() is None


def test_a_rank_is_slow_beside_the_median_one_of_its_gpu_type():
    """After eight looks, beyond what noise feigns; of two of a type neither is told, nor of ranks alike."""
    speeds, types = RankSpeeds(), ["v100"] * 4 + ["k80"] * 2
    seconds = [1.0, 1.24, 1.5, 1.0, 3.0, 9.0]
    for _ in range(7):
        speeds.add(seconds)
        assert speeds.slow(types) == ()
    speeds.add(seconds)
    assert [slow.rank for slow in speeds.slow(types)] == [2]
    assert speeds.slow(types)[0].factor == pytest.approx(1.5 / 1.12)
    assert [slow.rank for slow in speeds.slow(["v100"] * 6)] == [5, 4]
    assert speeds.speeds(column=2) == pytest.approx((1.0, 1.0, 1.12 / 6))
    for _ in range(5):
        speeds.add([1.0] * 6)
    assert speeds.slow(types) == ()
    speeds.forget()
    for _ in range(8):
        speeds.add([1.0] * 400 + [2.0] * 100)
    assert len(speeds.slow(["v100"] * 500)) == MOST_SLOW_RANKS


@pytest.mark.processes
def test_the_report_names_a_rank_that_is_emulated_slow(pods, small_config, tmp_path):
    """Three ranks, of which the last computes at an eighth of the others' speed."""
    channel = DirectoryChannel(tmp_path / "channel")
    plan = local_plan(["job-1-0", "job-1-1", "job-1-2"], network=62)
    channel.publish(plan)
    config = small_config(totalSteps=12, rebalance={"everySteps": 100})
    (tmp_path / "channel/config.json").write_text(json.dumps(config))
    for pod in plan.pods:
        slowdown = {"default": 8.0 if pod == "job-1-2" else 1.0}
        environment = {"BALLAST_EMULATED_SLOWDOWN": json.dumps(slowdown)}
        pods.start_pod(pod, tmp_path / "channel", environment)
    pods.succeeded()
    report = Report.from_json((tmp_path / "channel/report.json").read_text())
    assert report.slow_ranks[0].rank == 2 and report.slow_ranks[0].factor > 3


def test_the_probe_takes_as_long_as_layers_do_on_its_rank():
    """On the meter's own clock, and padded where a slower device is emulated."""
    now = iter(float(tick) for tick in range(100))
    meter = Meter(1, torch.device("cpu"), None, clock=lambda: next(now))
    assert SpeedProbe(meter, torch.device("cpu")).seconds() == 1.0
    assert not meter.compares_ranks, "layers that wait say nothing about a product"


def test_the_trainer_looks_when_as_much_is_lost_as_a_move_costs():
    """Even ranks are never looked at; uneven ones after a few steps."""
    even = job((0, 4, 8), minGain=0.02)
    measure(even, [1.0, 1.0])
    assert not monitor_of(even, 100).due()
    uneven = job((0, 2, 8), minGain=0.02)
    measure(uneven, [1.0, 1.0])
    monitor, steps = monitor_of(uneven), 0
    while not monitor.due():
        monitor.step_done()
        steps += 1
    assert 1 < steps < 8
    monitor.checked(moved_from=None)
    assert not monitor.due()


@pytest.mark.slow
def test_what_is_lost_counts_in_the_seconds_that_pass():
    """On a machine where steps take ten times their CPU seconds, uneven ranks lose ten times as much: a move
    whose pause was measured there pays as soon.
    """
    waits = []
    for shared in (1, 10):
        training = job((0, 2, 8), minGain=0.02)
        measure(training, [1.0, 1.0])
        monitor, steps = monitor_of(training), 0
        monitor._progress.move_seconds = 4.0 * shared
        predicted = monitor._predicted(training.stages, training.profile.costs())
        monitor._progress.step_done(1.0, shared * predicted, -math.inf)
        assert monitor.stretch() == pytest.approx(shared)
        while not monitor.due():
            monitor.step_done()
            steps += 1
        waits.append(steps)
    assert waits[0] == waits[1] > 3


@pytest.mark.slow
def test_a_move_that_measured_worse_is_taken_back_until_the_layers_change():
    """Five steps after it, all of them slower than any before; the same cut is not tried again."""
    training = job((0, 4, 8), minGain=0.02)
    monitor = monitor_of(training)
    progress = monitor._progress
    before, after = training.stages, stages_over(partition_of(job((0, 5, 8)).stages), (0, 1))
    measure(training, [1.0, 1.0])
    progress.step_done(1.0, 2.0, -math.inf)
    training.stages = after
    monitor.checked(moved_from=before, measured=(2.0, 2.1, 1.9))
    progress._step_seconds.clear()
    for seconds in (9.0, 2.9, 2.8, 3.0, 2.7):
        progress.step_done(1.0, seconds, -math.inf)
        assert monitor.reverts_to() is None
    progress.step_done(1.0, 2.8, -math.inf)
    training.stages = job((0, 3, 8)).stages
    assert monitor.reverts_to() is None, "a plan has moved them elsewhere meanwhile"
    training.stages = after
    assert monitor.reverts_to() == before
    monitor.reverted(after)
    assert monitor.was_worse(after) and monitor.reverts_to() is None
    measure(training, [2.0, 1.0])
    assert not monitor.was_worse(after), "its layers cost something else now"
