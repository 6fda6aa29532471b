"""The best plan: equal to brute force where that is possible, and its bound true."""

import dataclasses
import itertools

import numpy as np
import pytest
from ballast_policies.planning.gpu_profiles import GpuProfiles
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.best.search import plan_best
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import Layout, devices_of
from ballast_policies.planning.profile import GpuKind, LayerProfile, ProfiledLayer

from tests.policies.planning.planners.random_instances import random_model
from tests.support.examples import first_daily


def every_layout(model, batch):
    """All GPUs in all orders, in all shapes, with all partitions; symmetric ones once."""
    count, layers = model.devices.count, model.layers
    shapes = (
        (tensor, data, size, stages)
        for tensor in range(1, count + 1)
        for data in range(1, count // tensor + 1)
        for size in range(1, batch + 1)
        if batch % (data * size) == 0
        for stages in range(1, min(layers, count // (tensor * data), batch // (data * size)) + 1)
    )
    for tensor, data, size, stages in shapes:
        for order in itertools.permutations(range(count), tensor * data * stages):
            groups = np.array(order).reshape(stages, data, tensor)
            if (np.diff(groups, axis=2) < 0).any() or (np.diff(groups[0, :, 0]) < 0).any():
                continue
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                bounds = (0, *cuts, layers)
                for recompute in (0, 1, 2, 4):
                    yield Layout.of(
                        bounds,
                        [tuple(map(tuple, of_stage)) for of_stage in groups.tolist()],
                        microbatch_size=size,
                        microbatches=batch // size,
                        recompute=recompute,
                    )


def has_one_type_after_the_other(devices, layout):
    """As a gang has the GPUs of its pools: none of a stage, or of a type before, comes again."""
    types = [{devices.types[gpu] for gpu in stage.gpus} for stage in layout.stages]
    turns = [key for key, _ in itertools.groupby(map(tuple, types))]
    return all(len(each) == 1 for each in types) and len(turns) == len(set(turns))


@pytest.mark.parametrize("seed", first_daily(range(30), 8))
def test_best_equals_brute_force(seed):
    """Three types of GPUs, servers, memory, ZeRO stages: every layout that a gang can have is judged, none is
    faster, and the bound is it."""
    random = np.random.default_rng(seed)
    # Every fifth time the links inside servers are not the faster ones.
    inside = 1.5 if seed % 5 == 4 else 20.0
    sizes = {"most_gpus": 4 if seed % 3 else 3, "most_layers": 4}
    model = random_model(random, **sizes, inside=inside, zero_stage=seed % 4)
    batch = int(random.choice([1, 2, 3, 4]))
    judged = [
        model.judge(layout)
        for layout in every_layout(model, batch)
        if has_one_type_after_the_other(model.devices, layout)
    ]
    want = min((cost.seconds for cost in judged if cost.fits), default=None)
    if want is None:
        with pytest.raises(PlanningError, match=r"fits their memory|the largest GPU has"):
            plan_best(model, batch_size=batch, most_tensor=model.devices.count)
        return
    found = plan_best(model, batch_size=batch, most_tensor=model.devices.count)
    seconds, layout = found.plans[0]
    cost = model.judge(layout)
    assert cost.fits
    assert seconds == pytest.approx(cost.seconds, rel=1e-9)
    assert seconds == pytest.approx(want, rel=1e-9)
    assert found.optimal


def test_no_plan_repeats_the_fourth_of_three_layers():
    """It would be the same plan twice, once with a recomputation that there is not."""
    model = random_model(np.random.default_rng(7), most_gpus=3, most_layers=3)
    found = plan_best(model, batch_size=4, most_tensor=model.devices.count, top=1000)
    assert {layout.recompute for _, layout in found.plans} == {0, 1, 2}
    assert model.layers == 3


@pytest.mark.parametrize("seed", first_daily(range(8), 3))
def test_best_from_layers_measured_by_gpu_type_equals_brute_force(seed):
    """Some types were not measured at some degrees; links depend on the types."""
    random = np.random.default_rng(100 + seed)
    model = random_model(random, most_gpus=4, most_layers=3)
    kinds = model.devices.kinds
    measured = {
        (kind, tensor, size): tuple(
            ProfiledLayer(forward_seconds=f, backward_seconds=b, optimizer_seconds=u)
            for f, b, u in random.uniform(0.1, 2, (model.layers, 3)).tolist()
        )
        for kind in kinds
        for tensor in (1, 2)
        for size in (1, 2)
        if (tensor, size) == (1, 1) or random.random() < 0.7
    }
    devices = dataclasses.replace(
        model.devices,
        inside_of={kinds[0]: 5.0},
        between_of={(a, b): float(random.uniform(0.5, 9)) for a in kinds for b in kinds if a <= b},
    )
    model = CostModel(model.profile, (0.0,) * model.layers, 1, devices, measured=GpuProfiles(measured))
    judged = [
        model.judge(layout)
        for layout in every_layout(model, 4)
        if has_one_type_after_the_other(devices, layout)
        and all(
            (devices.types[g], layout.tensor, layout.microbatch_size) in measured
            for stage in layout.stages
            for g in stage.gpus
        )
    ]
    want = min((cost.seconds for cost in judged if cost.fits), default=None)
    if want is None:
        with pytest.raises(PlanningError, match=r"fits their memory|the largest GPU has"):
            plan_best(model, batch_size=4, most_tensor=model.devices.count)
        return
    found = plan_best(model, batch_size=4, most_tensor=model.devices.count)
    assert found.plans[0][0] == pytest.approx(want, rel=1e-9)
    assert model.judge(found.plans[0][1]).seconds == pytest.approx(want, rel=1e-9)
    assert found.bound <= want * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(6), 2))
def test_what_is_too_large_to_be_tried_in_full_has_a_bound_below_it(seed):
    """20 layers on 9 GPUs: the plan is feasible, and is not below the bound."""
    random = np.random.default_rng(seed)
    model = random_model(random, most_gpus=9, most_layers=20, memory=0.3)
    try:
        found = plan_best(model, batch_size=12, most_tensor=4)
    except PlanningError:
        return
    assert found.bound <= found.plans[0][0] * (1 + 1e-12)
    assert model.judge(found.plans[0][1]).fits


def test_a_server_may_have_any_number_of_gpus():
    """Also as all of a cluster whose file states no servers."""
    none, ones, twice = (0.0,) * 8, (1.0,) * 8, (2.0,) * 8
    profile = LayerProfile(
        forward_seconds=ones,
        backward_seconds=twice,
        held_bytes=ones,
        weight_bytes=none,
        activation_bytes=none,
        output_bytes=none,
    )
    kinds = [GpuKind(gpu_type="a", count=512, speed=1.0, memory_bytes=None)]
    devices = devices_of(kinds, gpus_per_server=512)
    found = plan_best(CostModel(profile, none, 1, devices), batch_size=512, most_tensor=1)
    # Each replica has one sample, whose layers run one after the other.
    assert found.plans[0][0] == pytest.approx(24.0)
