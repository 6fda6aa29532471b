"""2BW's memory, PTD-P's closed forms and communication volumes against the dissertation's numbers."""

import dataclasses

import pytest
from ballast_lab.ptdp import (
    GpuServers,
    Transformer,
    best_checkpoints,
    checkpointed_bytes,
    data_parallel_elements,
    pipeline_elements,
    plan_ptdp,
    scattered_pipeline_elements,
    step_seconds,
    tensor_parallel_elements,
)
from ballast_lab.two_versions import BlockModel, gpipe_memory_bytes, memory_bytes
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.schedules.builders.synchronous import one_forward_one_backward
from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.simulate import simulate
from hypothesis import given
from hypothesis import strategies as st

MODEL = BlockModel(
    weight_bytes=16e9,
    activation_bytes=4e9,
    boundary_bytes=8e6,
)
SERVERS = GpuServers(gpus=16, gpus_per_server=8, memory_bytes=16e9, fast_bandwidth=1e11, slow_bandwidth=1e9)


def test_memory_of_2bw_and_gpipe():
    """2 W / p + A + p Ain; 2 W / p + A / p + p Ain with recomputation; GPipe W / p + A / p + m Ain."""
    p, b, m = 4, 2, 16
    assert memory_bytes(MODEL, p, b, recompute=False) == 2 * 16e9 / 4 + 8e9 + 4 * 16e6
    assert memory_bytes(MODEL, p, b, recompute=True) == 2 * 16e9 / 4 + 8e9 / 4 + 4 * 16e6
    assert gpipe_memory_bytes(MODEL, p, b, m) == 16e9 / 4 + 8e9 / 4 + 16 * 16e6


GPT3 = Transformer(layers=96, hidden=12288, sequence=2048, vocabulary=51200)
TRILLION = Transformer(layers=128, hidden=25600, sequence=2048, vocabulary=51200)


@pytest.mark.parametrize(("model", "billions"), [(GPT3, 174.6), (TRILLION, 1008.0)])
def test_ptdp_counts_the_parameters_of_published_models(model, billions):
    """P = 12 l h^2 (1 + 13/12h + (V + s)/12lh): GPT-3 and the trillion-parameter model of table 4.1."""
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.05)


def test_ptdp_flops_of_a_step():
    """F: each layer four times its forward (recomputed), the logits three times theirs."""
    l, h, s, V, B = 128, 25600, 2048, 51200, 3072  # noqa: E741
    layer_forward = B * (24 * s * h**2 + 4 * s**2 * h)
    logits_forward = B * 2 * s * h * V
    assert TRILLION.step_flops(B) == pytest.approx(4 * l * layer_forward + 3 * logits_forward)


@given(p=st.integers(1, 6), m=st.integers(1, 12), share=st.floats(0.2, 0.8))
def test_ptdp_step_time_equals_the_simulator(p, m, share):
    """(b'/b + p - 1)(tf + tb) is 1F1B's makespan with even stages."""
    want = simulate(one_forward_one_backward(p, m), even_costs(p, forward=share, backward=1 - share)).makespan
    got = step_seconds(batch_per_pipeline=4 * m, microbatch_size=4, stages=p, microbatch_seconds=1.0)
    assert got == pytest.approx(want)


@given(layers=st.integers(1, 64), inner=st.floats(1.0, 50.0), outer=st.floats(0.1, 5.0), c=st.floats(0.1, 99))
def test_ptdp_no_number_of_checkpoints_needs_less_memory_than_the_best(layers, inner, outer, c):
    """c* = sqrt(l Aint / Ain) minimises c Ain + l / c Aint."""
    sizes = {"intermediate_bytes": inner, "input_bytes": outer}
    best = checkpointed_bytes(layers, best_checkpoints(layers, **sizes), **sizes)
    assert best <= checkpointed_bytes(layers, c, **sizes) * (1 + 1e-12)


def test_ptdp_scatter_gather_sends_one_t_th():
    """b s h / t between two ranks instead of b s h."""
    assert pipeline_elements(2, 16, 8) == 2 * 16 * 8
    assert scattered_pipeline_elements(2, 16, 8, 4) * 4 == pipeline_elements(2, 16, 8)


def test_ptdp_tensor_parallel_volume_is_8_bsh_t_minus_1_over_t():
    """Four all-reduces of b s h a layer, each 2 (t - 1) / t of it per rank; none without TP."""
    bsh = 2 * 16 * 8
    assert tensor_parallel_elements(2, 16, 8, 4) == pytest.approx(4 * 2 * 3 / 4 * bsh)
    assert tensor_parallel_elements(2, 16, 8, 4, layers=6) == pytest.approx(6 * 6 * bsh)
    assert tensor_parallel_elements(2, 16, 8, 1) == 0
    assert data_parallel_elements(100, 4) == 150


def test_ptdp_plan_keeps_tensor_parallelism_inside_a_server():
    """Take-away 1: 22 billion parameters on 4 servers of 8 use t <= 8, and model parallelism to fit."""
    model = Transformer(layers=48, hidden=6144, sequence=2048, vocabulary=51200)
    servers = GpuServers(
        gpus=32, gpus_per_server=8, memory_bytes=80e9, fast_bandwidth=3e11, slow_bandwidth=2.5e10
    )
    plans = plan_ptdp(model, servers, batch_size=512, flops_per_second=140e12)
    assert all(plan.pipeline * plan.tensor * plan.data == 32 for plan in plans)
    assert all(plan.tensor <= 8 and plan.bytes <= 80e9 for plan in plans)
    assert [plan.step_seconds for plan in plans] == sorted(plan.step_seconds for plan in plans)
    ideal = model.step_flops(512) / (32 * 140e12)
    assert ideal < plans[0].step_seconds < 1.6 * ideal


def test_ptdp_refuses_what_does_not_fit():
    """A trillion parameters on 8 GPUs."""
    servers = dataclasses.replace(SERVERS, gpus=8)
    with pytest.raises(PlanningError, match="no p x t x d over 8 GPUs fits"):
        plan_ptdp(TRILLION, servers, batch_size=512, flops_per_second=140e12)
