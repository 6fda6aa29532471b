"""What the trainer weighs when it rebalances, from its configuration and its own measurements."""

import dataclasses
import logging
import math

import numpy as np
import pytest
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import BalanceBy
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.launch import partition_of, stages_over
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.builders.synchronous import one_forward_one_backward
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.simulate import simulate
from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.precision import LossScale
from ballast_trainer.loop.progress import Progress, idle_seconds
from ballast_trainer.loop.rebalance_monitor import RebalanceMonitor
from ballast_trainer.loop.replanning import (
    LayerSizes,
    best_stages,
    layer_sizes,
    predicted_step_seconds,
    rebalance_decision,
    repack_proposal,
    staged_pipeline,
    within_memory,
)
from ballast_trainer.loop.state import RunState

from tests.support.plans import local_plan
from tests.trainer.layers.trained_layers import first_rank

LAYERS = 8
SECONDS = (0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4, 0.4)
SIZES = LayerSizes(bytes=(100,) * LAYERS, parameters=(25,) * LAYERS, weight_bytes=(30,) * LAYERS)


def job(bounds, *, repack=None, microbatches=4, activation_bytes=(), schedule="1F1B", **rebalance):
    """A job, of two ranks unless ``bounds`` has more, that has measured its layers once; from rank 0."""
    ranks = len(bounds) - 1
    config = JobConfig.from_mapping(
        {
            "totalSteps": 1000,
            "model": {"name": "gpt", "layers": LAYERS, "args": {"dim": 16, "heads": 2, "context": 8}},
            "pipeline": {
                "microbatches": microbatches,
                "globalBatchSize": microbatches,
                "schedule": schedule,
            },
            "rebalance": rebalance,
            "repack": {"enabled": True, **(repack or {})},
        }
    )
    training = first_rank(config, stages_over(Partition(bounds=bounds), tuple(range(ranks))), ranks)
    counted = [*activation_bytes, *[0.0] * 3 * LAYERS] if activation_bytes else ()
    add_step(training.profile, SECONDS, counted=counted)
    return training


def add_step(profile, layers, *, step=0, counted=()):
    """One measured step: a third of a layer's seconds is its forward."""
    seconds = [*(s / 3 for s in layers), *(s * 2 / 3 for s in layers), *[0.0] * len(layers)]
    profile.add(seconds, counted, step=step)


def decided(model, sizes=SIZES, *, steps_left=1000, move_seconds=0.01, link_seconds=None):
    """What rank 0 decides on a rebalance."""
    return rebalance_decision(
        model, sizes, steps_left=steps_left, move_seconds=move_seconds, link_seconds=link_seconds
    )


def run_of(model, ranks_per_pod=1):
    """Where the run of a job is, which has measured its layers."""
    pods = tuple(f"rank-{number}" for number in range(model.world.size // ranks_per_pod))
    plan = local_plan(pods, ranks_per_pod=ranks_per_pod)
    return RunState(plan=plan, loss_scale=LossScale("fp32"), step=8)


def proposed(model, ranks_per_pod=1):
    """The repack that rank 0 proposes to keep the speed that was."""
    return repack_proposal(model, run_of(model, ranks_per_pod), SIZES, reference_step_seconds=10.0)


@pytest.mark.parametrize("balancer", ["exact", "diffusion", "deepspeed"])
def test_measured_time_is_balanced(balancer):
    decision = decided(job((0, 4, 8), balancer=balancer), SIZES)
    assert decision.rebalance
    assert decision.partition.bounds == (0, 5, 8)


def test_layers_keep_away_from_a_slow_link():
    """The network-aware balancer gives the ends of a slow link less than the blind one, and says what
    a step takes with the link in it.
    """
    blind = decided(job((0, 5, 6, 8)))
    links = [0.0, 0.2]
    aware = decided(job((0, 5, 6, 8), balancer="network", minGain=0.0), link_seconds=links)
    assert blind.partition.bounds == (0, 5, 6, 8)
    loads = aware.partition.loads(SECONDS)
    assert loads[1] + loads[2] < blind.partition.loads(SECONDS)[1:].sum()
    assert aware.step_seconds_after < aware.step_seconds_before


def test_a_rank_is_never_sent_more_than_its_memory():
    """The better partition does not fit; the best that does is taken, or none."""
    decision = decided(job((0, 2, 8), memoryBytes=600))
    assert decision.partition.bounds == (0, 5, 8)
    decision = decided(job((0, 2, 8), memoryBytes=400))
    assert decision.partition.bounds == (0, 4, 8)


def test_activations_alone_change_what_fits():
    """What is held would fit as before; with two microbatches in flight on the first rank and one on the
    second, a layer less does.
    """
    without = decided(job((0, 2, 8), memoryBytes=900))
    assert without.partition.bounds == (0, 5, 8)
    measured = job((0, 2, 8), memoryBytes=900, activation_bytes=(50.0,) * LAYERS)
    assert decided(measured).partition.bounds == (0, 4, 8)


def test_activations_alone_prevent_a_repack():
    """One rank would hold the layers, and not what they keep for their backward."""
    held = job((0, 4, 8), memoryBytes=1000)
    assert proposed(held) is not None
    measured = job((0, 4, 8), memoryBytes=1000, activation_bytes=(50.0,) * LAYERS)
    assert proposed(measured) is None


@pytest.mark.parametrize(
    ("schedule", "activations", "versions"),
    [
        ("1F1B", [3, 2, 1], [1, 1, 1]),
        ("GPipe", [6, 6, 6], [1, 1, 1]),
        ("PipeDream2BW", [3, 2, 1], [2, 2, 2]),
        ("PipeDream", [3, 2, 1], [3, 2, 1]),
    ],
)
def test_a_ranks_bytes_are_those_of_the_schedule(schedule, activations, versions):
    """Activations and outputs of the microbatches in flight, room for two messages, and versions of the
    weights without a flush. Gradients, as large as the weights, are not there before the first backward.
    """
    training = job((0, 2, 5, 8), microbatches=6, activation_bytes=(10.0,) * LAYERS, schedule=schedule)
    training.profile.add([0.1] * 3 * LAYERS, [0.0] * LAYERS + [7.0] * LAYERS + [0.0] * 2 * LAYERS)
    capacity = within_memory(training, SIZES, RankCapacity(), 10_000)
    taken = capacity.bytes_taken(partition_of(training.stages))
    for rank, layers in enumerate((2, 3, 3)):
        step = activations[rank] * (10 * layers + 7)
        if schedule in ("GPipe", "PipeDream"):
            step -= min(30 * layers, 10 * layers + 7)
        further = (versions[rank] - 1) * 30 * layers
        assert taken[rank] == 100 * layers + step + 7 * 2 + further


def test_memory_that_is_too_small_for_any_partition_is_logged(caplog):
    """Nothing moves, and a warning has the numbers."""
    with caplog.at_level(logging.WARNING):
        assert decided(job((0, 4, 8), memoryBytes=300)) is None
    assert "800 bytes do not fit 2 ranks" in caplog.text


@pytest.mark.parametrize(
    ("bounds", "schedule", "kept"),
    [((0, 4, 8), "1F1B", 1), ((0, 2, 4, 6, 8), "Interleaved1F1B", 2)],
)
def test_a_repack_is_offered_only_where_the_ranks_that_stay_can_hold_the_layers(bounds, schedule, kept):
    """Fewer ranks would keep the pace that was; with too little memory they are not offered."""

    def offered(memory):
        repack = {"targetStages": kept}
        return proposed(job(bounds, schedule=schedule, repack=repack, memoryBytes=memory))

    assert len(offered(800 // kept + 100).kept_pods) == kept
    assert offered(799 // kept) is None


def test_a_repack_to_a_target_offers_that_many_ranks():
    """One rank would do, two are asked for; a target that is reached offers nothing more."""
    offered = proposed(job((0, 3, 5, 8)))
    assert offered.kept_pods == ("rank-0",)
    two = proposed(job((0, 3, 5, 8), repack={"targetStages": 2}))
    assert len(two.kept_pods) == len(two.stages) == 2
    reached = job((0, 5, 8), repack={"targetStages": 2})
    assert proposed(reached) is None


@pytest.mark.parametrize(("microbatches", "offered"), [(10, False), (12, True)])
def test_no_repack_is_offered_to_ranks_on_which_the_schedule_does_not_exist(microbatches, offered):
    """Interleaved stages on three ranks: 10 microbatches do not divide into rounds of 3, 12 do."""
    training = job(
        (0, 2, 4, 6, 8),
        schedule="Interleaved1F1B",
        microbatches=microbatches,
        repack={"targetStages": 3},
    )
    # Twice 3 stages, 8 layers.
    assert (proposed(training) is not None) == offered


def test_a_repack_of_pods_with_several_ranks_releases_whole_pods():
    """One rank would do, but it shares its pod: two stay. Of the others, neither pod is released in part."""
    offered = proposed(job((0, 2, 4, 6, 8)), ranks_per_pod=2)
    assert (offered.kept_pods, offered.released_pods) == (("rank-0",), ("rank-1",))
    assert [stage.rank for stage in offered.stages] == [0, 1]


def test_of_pods_with_several_ranks_the_one_that_holds_the_most_stays():
    """Rank 0's pod stays in any case; of the two others, the one whose layers need not travel."""
    training = job((0, 1, 2, 3, 4, 6, 8), repack={"targetStages": 4})
    offered = proposed(training, ranks_per_pod=2)
    assert (offered.kept_pods, offered.released_pods) == (("rank-0", "rank-2"), ("rank-1",))


def test_a_job_of_one_pod_offers_no_repack():
    """A part of a pod frees nothing that another job could have."""
    assert proposed(job((0, 2, 4, 6, 8)), ranks_per_pod=4) is None


def test_no_repack_is_offered_to_more_stages_than_there_are_layers():
    """Two chunks a rank, 8 layers: five ranks would have ten stages."""
    training = job((0, 1, 2, 3, 4, 5, 6, 8), schedule="LoopedBFS", repack={"targetStages": 5})
    assert proposed(training) is None


def test_parameters_are_balanced_where_asked_for():
    """The layers of one rank hold most of them; seconds decide whether it pays."""
    sizes = dataclasses.replace(SIZES, parameters=(1, 1, 1, 1, 1, 4, 4, 4))
    decision = decided(job((0, 4, 8), by=BalanceBy.PARAMETERS), sizes)
    assert decision.partition.bounds == (0, 6, 8)
    assert not decided(job((0, 4, 8), by=BalanceBy.PARAMETERS), SIZES).rebalance


def test_the_measured_cost_of_moving_decides():
    """What the last move took, against the steps that are left."""
    training = job((0, 4, 8))
    decision = decided(training, steps_left=1, move_seconds=60.0)
    assert not decision.rebalance
    assert "moving costs 60.000 s" in decision.why
    assert partition_of(training.stages) == decision.partition


@pytest.mark.parametrize("microbatches", [4, 8])
def test_idle_time_is_the_schedules_own_and_imbalances(microbatches):
    """1F1B: (p - 1) / m of the mean load, and what the simulated step of uneven stages takes longer."""
    training = job((0, 5, 8), microbatches=microbatches)
    found = idle_seconds(training, training.profile.costs())
    assert found.schedule == pytest.approx(1.0 / microbatches)
    loads = np.array([0.8, 1.2]) / microbatches
    costs = StageCosts(forward=tuple(loads / 3), backward=tuple(loads * 2 / 3))
    uneven = simulate(one_forward_one_backward(2, microbatches), costs).makespan
    assert found.imbalance == pytest.approx(uneven - (1.0 + 1.0 / microbatches))
    assert found.imbalance > 0


@pytest.mark.slow
def test_layer_sizes_are_those_of_the_layers_held():
    """Parameters and their gradients, as they are now."""
    training = job((0, 4, 8))
    training.world = World(epoch=1, rank=0, size=1, processes=("rank-0",), device=training.device)
    training.stages = stages_over(Partition(bounds=(0, LAYERS)), (0,))
    training.layers.hold(training.layers.make(index) for index in range(LAYERS))
    sizes = layer_sizes(training)
    for layer in training.layers:
        count = sum(p.numel() for p in layer.module.parameters())
        assert sizes.parameters[layer.index] == count
        assert sizes.bytes[layer.index] == layer.byte_count() >= 2 * 4 * count


@pytest.mark.slow
def test_a_gang_that_has_grown_is_not_repacked_to_its_old_size():
    """What a repack has to keep is the speed of the grown gang, and never that of a start on fewer ranks."""
    training, four = job((0, 4, 8)), stages_over(Partition(bounds=(0, 2, 4, 6, 8)), (0, 1, 2, 3))
    run = run_of(training)
    progress = Progress(training, run)
    measured = [0.1] * LAYERS + [0.2] * LAYERS + [0.0] * LAYERS

    def train(cost):
        training.profile.forget()
        for _ in range(3):
            training.profile.add([seconds * cost for seconds in measured], ())
            run.step += 1
            progress.step_done(1.0, 1.0, -math.inf)

    train(2.0)
    pods = tuple(f"rank-{rank}" for rank in range(4))
    run.plan, training.stages = local_plan(pods), four
    training.world = dataclasses.replace(training.world, size=4, processes=pods)
    progress.reshaped(grown=True)
    train(1.0)
    reference = progress.reference_step_seconds
    assert repack_proposal(training, run, SIZES, reference_step_seconds=reference) is None
    train(0.4)
    reference = progress.reference_step_seconds
    assert repack_proposal(training, run, SIZES, reference_step_seconds=reference) is not None


def staged_job(bounds, *, schedule="ZeroBubbleV", seconds=SECONDS):
    """Two ranks with two stages each, whose layers were measured in eight steps."""
    training = job((0, 4, LAYERS), schedule=schedule, minGain=0.0)
    placement = training.placement(2)
    assert len(placement) == 4
    partition = dataclasses.replace(exact_partition(seconds, 4), bounds=bounds)
    training.stages = stages_over(partition, placement)
    training.profile.forget()
    for _ in range(8):
        add_step(training.profile, seconds)
    return training


def monitor_of(model, steps=0):
    """Rank 0's monitor of a job, after so many steps."""
    monitor = RebalanceMonitor(Progress(model, run_of(model)))
    for _ in range(steps):
        monitor.step_done()
    return monitor


@pytest.mark.parametrize("schedule", ["ZeroBubbleV", "Interleaved1F1B"])
def test_a_look_is_due_only_where_the_balancer_moves_layers(schedule):
    """The same judge says what a step loses and what a move gains."""
    training = staged_job((0, 1, 2, 3, 8), schedule=schedule)
    assert monitor_of(training, 50).due()
    decision = decided(training, move_seconds=0.0)
    assert decision.rebalance
    training.stages = stages_over(decision.partition, training.placement(2))
    assert not monitor_of(training, 50).due()


@pytest.mark.parametrize("schedule", ["ZeroBubbleV", "Interleaved1F1B", "LoopedBFS"])
def test_first_stages_over_other_ranks_have_the_shortest_step_played(schedule):
    """After a growth or a repack: never longer than that of the most even stages."""
    training = staged_job((0, 2, 4, 6, 8), schedule=schedule)
    costs, placement = training.profile.costs(), training.placement(2)
    played = staged_pipeline(training, costs, placement)
    stages = best_stages(training, costs, placement)
    assert tuple(stage.rank for stage in stages) == placement
    by_stage = exact_partition(costs.total, len(placement))
    assert played.step_seconds(partition_of(stages)) <= played.step_seconds(by_stage)
    assert predicted_step_seconds(training, costs, stages) == played.step_seconds(partition_of(stages))


def test_one_stage_a_rank_needs_no_schedule_played():
    """The closed form is exact enough, and at no cost."""
    training = job((0, 4, 8))
    assert staged_pipeline(training, training.profile.costs(), (0, 1)) is None
