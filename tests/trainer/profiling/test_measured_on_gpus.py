"""What measuring costs a GPU, and what of it decides which rank is slow, with stand-ins for the device."""

import random

import pytest
import torch
from ballast_policies.contract.job.output import ProfilingConfig
from ballast_trainer.errors import TrainerError
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.rank_speeds import RankSpeeds, SpeedProbe
from ballast_trainer.profiling.torch_profile import StepProfiler
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.examples import first_daily
from tests.trainer.layers.trained_layers import CPU, all_layers, one_stage

LAYERS = 4


class FakeEvent:
    """An event of a device that takes a millisecond from each event to the next."""

    recorded, waits = 0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "the step's"
        FakeEvent.recorded += 1
        self.at = FakeEvent.recorded

    def synchronize(self):
        FakeEvent.waits += 1

    def elapsed_time(self, other):
        return float(other.at - self.at)


def test_a_measured_step_waits_for_the_gpu_once_its_seconds_are_read(monkeypatch):
    """No synchronisation of the device in forwards, backwards and updates, whatever the layers."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the step's")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the whole device is waited for"))
    FakeEvent.recorded = FakeEvent.waits = 0
    model = build_gpt(layers=LAYERS, dim=8, heads=2, context=4)
    layers = all_layers(model)
    meter = Meter(LAYERS, torch.device("cuda", 0), None)
    batch = model.batch(0, 0, 6)
    one_stage(model, layers, 3, meter).run(lambda: batch)
    forward_and_backward = FakeEvent.recorded
    began = meter.start_optimizer()
    for index in range(LAYERS):
        began = meter.add_optimizer(index, began)
    assert FakeEvent.waits == 0
    seconds = meter.seconds()
    assert FakeEvent.waits > 0
    forward, backward, updates = seconds[:LAYERS], seconds[LAYERS : 2 * LAYERS], seconds[2 * LAYERS :]
    # Three microbatches enter each layer once each way; a backward begins with the loss.
    assert backward == pytest.approx([3e-3] * (LAYERS - 1) + [6e-3])
    assert min(forward) >= 3e-3
    assert updates == pytest.approx([1e-3] * LAYERS)
    assert meter.busy_seconds() >= sum(forward + backward) - 1e-9
    meter.start_step(1, by_layer=False)
    one_stage(model, layers, 3, meter).run(lambda: batch)
    assert FakeEvent.recorded == forward_and_backward + LAYERS + 1, "those not measured have none"


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", first_daily(range(20), 5))
def test_what_starts_a_kernel_does_not_decide_which_rank_is_slow(seed):
    """Ranks of 40 us a product and 10 to 30 us of a start are alike; one of 60 us a product is not."""
    jitter, speeds = random.Random(seed), RankSpeeds()

    def probed(product_seconds):
        with Products() as products:
            begins = [True]

            def clock():
                # A run starts late by what it takes to start it.
                now = products.count * product_seconds + late[0]
                late[0] += jitter.uniform(10e-6, 30e-6) if begins[0] else 0.0
                begins[0] = not begins[0]
                return now

            late = [0.0]
            probe = SpeedProbe(Meter(1, CPU, None, clock=clock), CPU)
            return [probe.seconds() for _ in range(4)]

    for row in zip(probed(40e-6), probed(40e-6), strict=True):
        speeds.add(row)
    assert speeds.speeds() is None
    speeds.forget()
    for row in zip(probed(40e-6), probed(60e-6), strict=True):
        speeds.add(row)
    assert speeds.speeds() == pytest.approx((1.0, 2 / 3), rel=0.05)


def fails_as(kind):
    if kind == "plain":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if kind == "wrapped":
        raise TrainerError("stage 1 cannot run") from torch.OutOfMemoryError("CUDA out of memory")
    raise ValueError("something else")


@pytest.mark.parametrize(("kind", "written"), [("plain", 1), ("wrapped", 1), ("other", 0)])
def test_running_out_of_memory_leaves_a_snapshot(monkeypatch, tmp_path, kind, written):
    """Also where the stage's trial has told of it; any other error leaves none."""
    asked = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", asked.append)
    config = ProfilingConfig(path=str(tmp_path), memory_snapshot=True)
    profiler = StepProfiler(config, rank=2, device=torch.device("cuda", 0))
    with pytest.raises((torch.OutOfMemoryError, TrainerError, ValueError)), profiler.on_out_of_memory():
        fails_as(kind)
    assert asked == [{"max_entries": 100_000}, *[str(tmp_path / "rank-2.memory.pickle")] * written]
