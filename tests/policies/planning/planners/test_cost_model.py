"""The one cost model against the simulator of schedules, and against arithmetic by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import Layout, devices_of
from ballast_policies.planning.planners.one_f_one_b import backward_ends
from ballast_policies.planning.profile import GpuKind, LayerProfile
from ballast_policies.planning.schedules.builders.synchronous import one_forward_one_backward
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.simulate import simulate

from tests.policies.planning.planners.random_instances import random_model
from tests.support.examples import first_daily


@pytest.mark.parametrize("seed", first_daily(range(40), 10))
def test_a_steps_end_on_every_stage_is_the_simulators(seed):
    """Any stages, links fast and slow, fewer microbatches than stages and many more."""
    random = np.random.default_rng(seed)
    p, m = int(random.integers(1, 9)), int(random.integers(1, 50))
    forward, backward = random.uniform(0.1, 2, (3, p)), random.uniform(0.1, 3, (3, p))
    transfer = random.uniform(0, random.choice([0, 0.1, 3]), (3, p - 1))
    found = backward_ends(forward, backward, transfer, m)
    for row in range(3):
        costs = StageCosts(
            forward=tuple(forward[row]),
            backward=tuple(backward[row]),
            transfer=tuple(transfer[row]),
            serial_links=True,
        )
        trace = simulate(one_forward_one_backward(p, m), costs)
        ends = [max(span.end for span in trace.spans if span.rank == rank) for rank in range(p)]
        assert found[row] == pytest.approx(ends, rel=1e-9)


def test_a_long_steady_run_is_not_played_microbatch_by_microbatch():
    """It advances by the same seconds each microbatch: 60,000 end when arithmetic says."""
    even = np.full((1, 4), 1.0)
    (ends,) = backward_ends(even, 2 * even, np.zeros((1, 3)), 60_000)
    assert ends[0] == pytest.approx(3.0 * (60_000 + 3))


@pytest.mark.parametrize("seed", first_daily(range(60), 15))
def test_the_judge_agrees_with_the_simulator_for_any_layout(seed):
    """Tensor and data degrees, recomputation, mixed GPUs and links, and stages with different replicas."""
    random = np.random.default_rng(seed)
    model = random_model(random, most_gpus=8)
    gpus = random.permutation(model.devices.count).tolist()
    tensor = int(random.integers(1, len(gpus) + 1))
    groups = [tuple(gpus[i : i + tensor]) for i in range(0, len(gpus) - tensor + 1, tensor)]
    stages = int(random.integers(1, min(len(groups), model.layers) + 1))
    cuts = sorted(random.choice(np.arange(1, model.layers), stages - 1, replace=False).tolist())
    ends = sorted(random.choice(np.arange(1, len(groups)), stages - 1, replace=False).tolist())
    bounds, shares = [0, *cuts, model.layers], [0, *ends, len(groups)]
    layout = Layout.of(
        bounds,
        (tuple(groups[first:end]) for first, end in itertools.pairwise(shares)),
        microbatch_size=int(random.integers(1, 4)),
        microbatches=int(random.integers(1, 13)),
        recompute=int(random.integers(4)),
    )
    assert model.judge(layout).seconds == pytest.approx(model.trace(layout).makespan, rel=1e-9)


@pytest.mark.slow
def test_a_step_of_very_many_microbatches_is_as_long_as_if_it_were_played():
    """Of stages with different numbers of replicas, whose order repeats every six microbatches."""
    model = random_model(np.random.default_rng(5), most_gpus=7, most_layers=6, memory=0)
    groups = [((0,), (1,)), ((2,),), ((3,), (4,), (5,))]
    layout = Layout.of((0, 1, 2, model.layers), groups, microbatch_size=1, microbatches=2501)
    assert model.judge(layout).seconds == pytest.approx(model.trace(layout).makespan, rel=1e-9)


def test_seconds_and_bytes_by_hand():
    """Two stages of two replicas on a fast and a slow server; then the same recomputed."""
    profile = LayerProfile(
        forward_seconds=(1.0, 1.0),
        backward_seconds=(2.0, 2.0),
        held_bytes=(10.0, 20.0),
        weight_bytes=(4.0, 8.0),
        activation_bytes=(3.0, 5.0),
        output_bytes=(2.0, 0.0),
    )
    kinds = [GpuKind(gpu_type="a", count=2, speed=2.0), GpuKind(gpu_type="b", count=2)]
    devices = devices_of(kinds, gpus_per_server=2, inside=8.0, between=2.0)
    model = CostModel(profile, (0.0, 0.0), 1, devices)
    groups = [((0,), (1,)), ((2,), (3,))]
    cost = model.judge(Layout.of((0, 1, 2), groups, microbatch_size=1, microbatches=4))
    # The first stage sends after 0.5 s, arriving 1 s later; the second does 1 + 2 s twice and exchanges
    # 8 bytes at 8 bytes/s; the first has the last gradient 1 s after it, 1 s of work and 4 bytes to exchange.
    assert cost.seconds == pytest.approx(1.5 + 6.0 + max(1.0, 1.0 + 1.0 + 0.5))
    # Two pipelines of two microbatches. Both are in flight on the first stage before its gradients, 4 bytes,
    # are there: of 3 + 2 bytes each. The second has one, of 5, less than the copy of its gradients that are
    # averaged, 8. Both have room for two messages.
    assert cost.bytes == (10.0 + (2 * 5.0 - 4.0) + 2 * 2.0, 20.0 + 8.0 + 2 * 2.0)
    again = model.judge(Layout.of((0, 1, 2), groups, microbatch_size=1, microbatches=4, recompute=True))
    # Inputs are kept, 0 and 2 bytes, and 3 and 5 are there while the layer's backward runs.
    assert again.bytes == (10.0 + 2.0 + 3.0 + 2 * 2.0, 20.0 + 8.0 + 2 * 2.0)
    some = model.judge(Layout.of((0, 1, 2), groups, microbatch_size=1, microbatches=4, recompute=2))
    # The second layer alone.
    assert some.bytes == (cost.bytes[0], again.bytes[1])
    assert again.seconds > some.seconds == cost.seconds + 2 * 1.0


def test_tokens_travel_to_their_experts_in_each_microbatch():
    """One stage of two replicas, two microbatches each: half of 4 bytes leaves, four times, at 8 bytes/s."""
    profile = LayerProfile(
        forward_seconds=(1.0,),
        backward_seconds=(2.0,),
        held_bytes=(16.0,),
        weight_bytes=(8.0,),
        activation_bytes=(3.0,),
        output_bytes=(0.0,),
        expert_bytes=(8.0,),
        experts=(3,),
        routed_bytes=(4.0,),
    )
    devices = devices_of([GpuKind(gpu_type="a", count=2)], gpus_per_server=2, inside=8.0)
    model = CostModel(profile, (0.0,), 1, devices)
    layout = Layout.of((0, 1), [((0,), (1,))], microbatch_size=1, microbatches=4)
    cost = model.judge(layout)
    assert cost.seconds == pytest.approx(2 * (3.0 + 4 * 2 / 8))
    # Two of three experts, gradients included; and the activations.
    assert cost.bytes == (pytest.approx(16 * 2 / 3 + 3.0),)
    again = model.judge(dataclasses.replace(layout, recompute=1))
    assert again.seconds == pytest.approx(2 * (4.0 + 6 * 2 / 8))


@pytest.mark.parametrize(("zero_stage", "halves"), [(1, 2), (2, 2 + 1), (3, 2 * 3)])
def test_replicas_that_share_weights_gather_them_in_each_action(zero_stage, halves):
    """One stage of two replicas, two microbatches each, weights of 8 bytes at 8 bytes/s: halves of 0.5 s.

    ZeRO-1 as without; of ZeRO-2 two scatters and a gather, of ZeRO-3 two gathers and a scatter each.
    """
    profile = LayerProfile(
        forward_seconds=(1.0,),
        backward_seconds=(2.0,),
        held_bytes=(32.0,),
        weight_bytes=(8.0,),
        activation_bytes=(3.0,),
        output_bytes=(0.0,),
    )
    devices = devices_of([GpuKind(gpu_type="a", count=2)], gpus_per_server=2, inside=8.0)
    layout = Layout.of((0, 1), [((0,), (1,))], microbatch_size=1, microbatches=4)
    plain, shared = (
        CostModel(profile, (0.0,), 1, devices, zero_stage=stage).judge(layout) for stage in (0, zero_stage)
    )
    assert plain.seconds == pytest.approx(2 * 3.0 + 2 * 0.5)
    assert shared.seconds == pytest.approx(2 * 3.0 + halves * 0.5)
