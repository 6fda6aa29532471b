"""What layers keep for their backward is counted in the running job, as the profile command counts it."""

import gc
import weakref

import pytest
import torch
from ballast_policies.contract.messages import Report
from ballast_policies.planning.profile import repeated_layers
from ballast_trainer.dynamics.pruning.sparse_linear import PrunableLinear
from ballast_trainer.layer_profiler import layer_rows
from ballast_trainer.models.protocol import Model
from ballast_trainer.profiling.activations import SavedTensors, weight_gradient_bytes
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.profile import Profile
from torch import nn

from tests.support.examples import first_daily

CASES = {
    "some recomputed": {"training": {"recompute": True, "recomputeEvery": 2}},
    "recomputed": {"training": {"recompute": True}},
    "plain": {},
    "frozen": {"dynamics": [{"kind": "freezing", "startStep": 2, "endStep": 4, "target": 0.4}]},
    "pruned": {"dynamics": [{"kind": "pruning", "startStep": 2, "endStep": 4, "target": 0.95}]},
}


def tanh_layers():
    """A model whose layers keep their own outputs, which are the inputs of the next."""
    return Model(
        layer_count=4,
        build_layer=lambda index: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        loss=nn.functional.mse_loss,
    )


def counted(channel):
    report = Report.from_json((channel / "report.json").read_text())
    return list(report.layer_activation_bytes)


def test_gradients_into_weights_are_those_of_the_outputs_of_products():
    """Of 4 x 8 samples: into a norm's weights, and into two matrices; none where no input learns."""
    layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    value = torch.ones(4, 8, 16)
    assert weight_gradient_bytes(layers(value.requires_grad_())) == 4 * 8 * 4 * (16 + 64 + 16)
    assert weight_gradient_bytes(nn.Linear(16, 64)(torch.ones(3, 16))) == 0
    assert weight_gradient_bytes(torch.ones(3)) == 0


@pytest.mark.processes
@pytest.mark.parametrize("case", first_daily(CASES))
def test_a_running_job_counts_what_the_profile_command_counts(gang, small_config, same_curve, tmp_path, case):
    """On two ranks, to the byte, also under recomputation, above frozen layers and for pruned ones; the
    curve is that of one process.
    """
    config = small_config(totalSteps=8, **CASES[case])
    channel = tmp_path / "channel"
    same_curve(gang(config, ranks=2, options=["--channel", str(channel)]), config)
    rows = layer_rows(config, steps=1, at_step=7)["layers"]
    assert counted(channel) == [row["activationBytes"] for row in rows]
    if case == "plain" or "recomputed" in case:  # frozen layers have no gradients, which depends on the cut
        report = Report.from_json((channel / "report.json").read_text())
        assert report.flops_per_second is not None and report.flops_per_second > 0
        assert list(report.layer_weight_bytes) == [row["weightBytes"] for row in rows]
        assert list(report.layer_output_bytes) == [row["outputBytes"] for row in rows]
        assert list(report.layer_gradient_bytes) == [row["gradientBytes"] for row in rows]
        assert list(report.layer_repeated_bytes) == [row["repeatedBytes"] for row in rows]
        assert any(report.layer_gradient_bytes)
        every = config["training"].get("recomputeEvery", 1) if case != "plain" else 0
        repeated = repeated_layers(len(rows), every).tolist()
        assert [row["repeatedBytes"] > 0 for row in rows] == repeated


LAYOUTS = {
    "ZeroBubbleV": (2, {"pipeline": {"schedule": "ZeroBubbleV"}}),
    "replicas of a stage": (3, {"pipeline": {"replicas": [2, 1]}}),
    "replicas of the pipeline": (2, {"parallelism": {"data": 2}}),
    "Interleaved1F1B": (2, {"pipeline": {"schedule": "Interleaved1F1B"}}),
    "PipeDream2BW": (2, {"pipeline": {"schedule": "PipeDream2BW"}}),
}


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "change"), first_daily(LAYOUTS.values(), 2), ids=LAYOUTS)
def test_every_layout_counts_one_microbatch_once(gang, small_config, tmp_path, ranks, change):
    """Several stages a rank, replicas, of which each keeps as much, and a pipeline that does not drain."""
    plain = small_config(totalSteps=6)
    config = plain | {key: plain.get(key, {}) | value for key, value in change.items()}
    gang(config, ranks=ranks, options=["--channel", str(tmp_path / "channel")]).succeeded()
    rows = layer_rows(plain, steps=1, at_step=5)["layers"]
    assert counted(tmp_path / "channel") == [row["activationBytes"] for row in rows]


@pytest.mark.processes
def test_an_output_that_two_ranks_keep_counts_on_both(gang, small_config, tmp_path):
    """Within a stage it counts for the layer that makes it; behind a cut the next layer holds it again."""
    config = small_config(
        totalSteps=6,
        model={"name": "tests.trainer.profiling.test_activation_bytes:tanh_layers"},
        data={"name": "tests.trainer.models.picky_model:batches"},
    )
    channel = tmp_path / "channel"
    gang(config, ranks=2, options=["--channel", str(channel)]).succeeded()
    kept = [row["activationBytes"] for row in layer_rows(config, steps=1, at_step=5)["layers"]]
    message = 2 * 8 * 4
    # A microbatch's part of the input and an output each; the last also what the loss keeps, the targets.
    assert kept == [2 * message, message, message, 2 * message]
    assert counted(channel) == [2 * message, message, 2 * message, 2 * message]


def test_a_storage_counts_once_and_weights_do_not():
    """Of a batch the microbatch's part, a ReLU's output for the first layer that keeps it, no weight."""
    part = torch.zeros(6, 4).chunk(3)[0]
    first, second = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3)
    kept = SavedTensors(part)
    with kept.saving(0):
        hidden = first(part)
    with kept.saving(1):
        output = second(hidden)
    with kept.saving(2):
        output.square().sum()
    counts = kept.count([first, second])
    assert counts == {0: 2 * 4 * 4 + 2 * 8 * 4, 1: 0, 2: 2 * 3 * 4}
    assert kept.count() == {}


def test_a_sparse_layer_keeps_its_input_alone():
    """Its CSR matrices are weights."""
    linear = PrunableLinear(nn.Linear(16, 16))
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask.fill_diagonal_(True)
    linear.prune(mask)
    assert linear.values is not None
    source = torch.zeros(5, 16)
    kept = SavedTensors(source)
    with kept.saving(0):
        linear(source).sum()
    assert kept.count([linear]) == {0: 5 * 16 * 4}


class Doubled(torch.autograd.Function):
    """A node of a graph that Python can watch."""

    @staticmethod
    def forward(ctx, source):
        """Keeps its input."""
        ctx.save_for_backward(source)
        return source * 2

    @staticmethod
    def backward(ctx, gradient):
        """Twice the gradient."""
        return gradient * 2


def test_counting_keeps_nothing_alive():
    """Once the forward's result and the counter are gone, so is the graph: an output that its own node
    keeps makes no cycle.
    """
    kept = SavedTensors(torch.zeros(2, 4))
    with kept.saving(0):
        inner = Doubled.apply(torch.ones(2, 4, requires_grad=True))
        result = inner.sigmoid()
    assert kept.count() == {0: 2 * 4 * 4 * 2}
    node = weakref.ref(inner.grad_fn)
    gc.disable()
    try:
        del inner, result, kept
        assert node() is None
    finally:
        gc.enable()


def test_bytes_are_counted_once_in_a_step_and_cost_no_layer_seconds():
    """Of a stage's first microbatch in a measured step; the clock stands while it counts."""
    now = iter(range(100))
    meter = Meter(2, torch.device("cpu"), None, clock=lambda: float(next(now)))
    stage, source = nn.Linear(4, 4), torch.zeros(2, 4)
    counted = []
    for microbatch in range(2):
        meter.begin(microbatch, meter.forward, 0)
        kept = meter.start_count(0, source)
        counted.append(kept is not None)
        if kept is not None:
            with kept.saving(0):
                stage(source)
        meter.add_kept([stage])
        meter.end()
    assert counted == [True, False]
    assert meter.bytes[:2] == [32.0, 0.0]
    # The clock advances a second with each reading: four in the first microbatch, two of them around the
    # count, and two in the second.
    assert meter.forward == [2.0 + 1.0, 0.0]
    meter.start_step(1, by_layer=False)
    meter.begin(0, meter.forward, 0)
    assert meter.start_count(0, source) is None


def test_a_step_without_a_forward_does_not_empty_the_profile():
    """A rank of a pipeline without a flush may compute backwards alone in a step; forgetting forgets."""
    profile = Profile(2)
    assert profile.bytes() is None
    for count in (10.0, 0.0, 0.0):
        profile.add([0.0] * 6, [count, 7.0, *[0.0] * 6])
    assert profile.bytes().activation_bytes == (10, 7)
    profile.forget()
    assert profile.bytes() is None


@pytest.mark.processes
@pytest.mark.parametrize("recompute", first_daily([False, True]))
def test_the_memory_limit_counts_what_the_running_job_has_measured(gang, small_config, same_curve, recompute):
    """Two ranks could hold the layers, and not what these keep for their backward: that is said, and
    nothing moves. Recomputed, they fit. The curve is that of one process.
    """
    config = small_config(
        totalSteps=12,
        training={"recompute": recompute},
        rebalance={"everySteps": 10, "minGain": 0.9, "memoryBytes": 1_000_000},
    )
    rows = layer_rows(config, steps=1, at_step=0)["layers"]
    held = sum(row["heldBytes"] for row in rows)
    assert 1.1 * held < 2 * 1_000_000
    running = gang(config, ranks=2)
    same_curve(running, config)
    assert ("do not fit 2 ranks" in running.errors()) is not recompute
    assert not running.events("rebalance")
