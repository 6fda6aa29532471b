"""AMP: step time, layer assignment, placement and search (supplement of AMP, NeurIPS 2022)."""

import dataclasses
import itertools

import numpy as np
import pytest
from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.planners.amp import (
    Grid,
    anneal,
    assign_layers,
    pipeline_seconds,
    sample_tiling,
    search,
    step_seconds,
    tiling_degrees,
    tilings,
    with_best_layers,
)
from ballast_policies.planning.planners.cost_model import CostModel, Degrees
from ballast_policies.planning.planners.layout import devices_of
from ballast_policies.planning.profile import GpuKind, LayerProfile
from ballast_policies.planning.rank_capacity import taken_by_sums
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import first_fast


@pytest.mark.parametrize(
    ("rows", "columns", "tensor", "data", "count"),
    [
        (4, 4, 1, 2, 36),  # domino tilings of the 4 x 4 board
        (2, 4, 2, 1, 5),
        (4, 4, 1, 1, 1),
        (4, 4, 4, 4, 2),
        (2, 2, 3, 1, 0),
    ],
)
def test_amp_dominoes_tile_the_grid(rows, columns, tensor, data, count):
    """As many tilings as there are; every device is in exactly one domino; groups are straight lines."""
    found = list(tilings(rows, columns, tensor=tensor, data=data))
    assert len(found) == count
    for placement in found:
        devices = [device for stage in placement for group in stage for device in group]
        assert sorted(devices) == list(range(rows * columns))
        for stage in placement:
            assert len(stage) == data
            for group in stage:
                assert len(group) == tensor
                steps = {b - a for a, b in itertools.pairwise(group)}
                assert steps <= {columns} or steps <= {1}


@given(seed=st.integers(0, 1000))
def test_a_sampled_tiling_is_one_of_them(seed):
    """Coin tosses decide which."""
    random = np.random.default_rng(seed)
    assert sample_tiling(4, 2, tensor=2, data=1, choose=random.random) in set(tilings(4, 2, tensor=2, data=1))


def layers_of(seconds, *, weights=4e6, outputs=1e5, overhead=0.001):
    """A fourth of what is held are weights; outputs are kept for the backward."""
    count = len(seconds)
    return LayerProfile(
        forward_seconds=tuple(0.4 * each for each in seconds),
        backward_seconds=tuple(0.6 * each + overhead for each in seconds),
        overhead_seconds=(overhead,) * count,
        held_bytes=(4 * weights,) * count,
        weight_bytes=(weights,) * count,
        activation_bytes=(outputs,) * count,
        output_bytes=(outputs,) * count,
    )


LAYERS = layers_of([0.01 * (1 + index % 3) for index in range(10)])


def grid(columns=2, rows=4, *, layers=LAYERS, fast=1e10, slow=1e8, last_speed=1.0, memory=None):
    """Servers of ``rows`` GPUs, those of the last one as fast as ``last_speed``."""
    speeds = (*(1.0,) * (columns - 1), last_speed)
    kinds = [
        GpuKind(gpu_type=f"type-{i}", count=rows, speed=speed, memory_bytes=memory)
        for i, speed in enumerate(speeds)
    ]
    devices = devices_of(kinds, gpus_per_server=rows, inside=fast, between=slow)
    model = CostModel(layers, (2e5,) * layers.layers, 1, devices)
    return Grid(model)


def test_amp_step_time_by_hand():
    """(gas - 1) max t + sum t + sum e + the slowest gradient exchange, for one strategy of 4 devices."""
    cluster = grid(
        rows=2, layers=layers_of([1.0] * 4, weights=1e8, outputs=1e7, overhead=0.0), fast=1e8, slow=1e7
    )
    placement = (((0,), (2,)), ((1,), (3,)))  # two stages, each two replicas in a column
    strategy = with_best_layers(cluster, placement, microbatch_size=1, batch_size=8)
    assert strategy.bounds == (0, 2, 4)
    assert cluster.placement(strategy) == placement
    gas, t, e = 4, 2.0, 2 * 1e7 / 1e7
    sync = 2 * 1 / 2 * 2e8 / 1e8
    assert step_seconds(strategy, cluster.model) == pytest.approx((gas - 1) * t + 2 * t + e + sync)


def test_layers_whose_weights_are_gathered_for_each_microbatch_take_longer():
    """ZeRO-3: of all cuts, the one with the shortest step has fewer of the layers with many weights."""
    weights = (1e8, 1e8, 1e8, 0.0, 0.0, 0.0)
    layers = dataclasses.replace(layers_of([1.0] * 6), weight_bytes=weights, held_bytes=weights)
    model = grid(rows=2, layers=layers).model
    cluster = Grid(CostModel(layers, (0.0,) * 6, 1, model.devices, zero_stage=3))
    placement = (((0,), (1,)), ((2,), (3,)))
    found = with_best_layers(cluster, placement, microbatch_size=1, batch_size=16)
    every = [
        Degrees(1, 2, 1, 8).layout((0, cut, 6), cluster.gpus(placement)) for cut in range(1, layers.layers)
    ]
    assert found == min(every, key=lambda layout: step_seconds(layout, cluster.model))
    assert found.bounds != (0, 3, 6)


@given(seed=st.integers(0, 10**6))
def test_layers_go_where_no_other_cut_has_a_shorter_step(seed):
    """Of all cuts that fit the memory, over heterogeneous stages and boundaries, of equal layers."""
    random = np.random.default_rng(seed)
    stages = int(random.integers(1, 5))
    layers = int(random.integers(stages, 9))
    seconds = random.choice([0.0, 1.0, 2.0, 7.0], size=layers) * random.choice([1.0, 3.0], size=(stages, 1))
    boundary = random.choice([0.0, 0.1, 5.0], size=(stages - 1, layers - 1))
    sums = np.tile(np.concatenate([[0.0], np.cumsum(random.random(layers))]), (stages, 1))
    memory, gas = random.uniform(0.5, 4, size=stages), int(random.integers(1, 20))
    cuts = [
        Partition(bounds=(0, *inner, layers))
        for inner in itertools.combinations(range(1, layers), stages - 1)
    ]
    fitting = [
        cut
        for cut in cuts
        if all(sums[i, cut.bounds[i + 1]] - sums[i, cut.bounds[i]] <= memory[i] for i in range(stages))
    ]
    limits = {"taken": taken_by_sums(sums), "memory": memory.tolist()}
    if not fitting:
        with pytest.raises(PlanningError):
            assign_layers(seconds, boundary, gas, **limits)
        return
    found = assign_layers(seconds, boundary, gas, **limits)
    assert found in fitting
    best = min(pipeline_seconds(cut, seconds, boundary, gas) for cut in fitting)
    assert pipeline_seconds(found, seconds, boundary, gas) == pytest.approx(best, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_fast(range(3)))
def test_amp_annealing_finds_the_exhaustive_best_of_8_devices(seed):
    """Within 200 evaluations, on a cluster with a slow half."""
    cluster = grid(last_speed=0.4)
    every = search(cluster, batch_size=16, evaluations=10_000)
    found = anneal(cluster, tiling_degrees(cluster, 16), batch_size=16, evaluations=200, seed=seed)
    assert found.plans[0][0] == pytest.approx(every.plans[0][0], rel=1e-9)
    assert found.evaluations == 200


@pytest.mark.slow
def test_amp_every_plan_is_feasible_and_the_same_seed_gives_the_same_plans():
    """Degrees multiply to the devices, layers are all assigned, memory holds."""
    cluster = grid(memory=1e8)
    found = anneal(cluster, tiling_degrees(cluster, 16), batch_size=16, evaluations=60, seed=5)
    for cost, strategy in found.plans:
        assert strategy.tensor * strategy.data * strategy.pipeline == 8
        assert strategy.unsuited(LAYERS.layers, 8) is None
        assert 16 % (strategy.data * strategy.microbatch_size) == 0
        gas = 16 // (strategy.data * strategy.microbatch_size)
        degrees = Degrees(strategy.tensor, strategy.data, strategy.microbatch_size, gas)
        held = cluster.model.stage_bytes(degrees, strategy.pipeline)
        assert held.of_cut(Partition(bounds=strategy.bounds)).max() <= 1e8
        assert cost == step_seconds(strategy, cluster.model)
    assert anneal(cluster, tiling_degrees(cluster, 16), batch_size=16, evaluations=60, seed=5) == found


def test_what_fits_no_device_is_refused():
    with pytest.raises(PlanningError, match="fits the devices' memory"):
        anneal(grid(memory=1.0), tiling_degrees(grid(), 16), batch_size=16, evaluations=20)
    placement = tuple(((d,), (d + 4,)) for d in range(4))
    strategy = with_best_layers(grid(), placement, microbatch_size=2, batch_size=8)
    with pytest.raises(PlanningError, match="use a multiple of 4"):
        step_seconds(dataclasses.replace(strategy, microbatches=7), grid().model)
