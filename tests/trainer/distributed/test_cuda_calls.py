"""Calls on a GPU that would make training wait, or connect late, seen in what is asked of torch."""

import itertools
import os
import types

import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.training import TrainingConfig
from ballast_policies.contract.messages import Rank
from ballast_policies.contract.plan import Directive, Plan
from ballast_trainer.config import read_job_config
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import World, join
from ballast_trainer.layers import packing
from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.optimizer_state import from_tensor
from ballast_trainer.layers.packing import as_bytes, pack, unpack
from ballast_trainer.loop.batches import Batches
from ballast_trainer.loop.state import ModelState
from ballast_trainer.models.protocol import Model
from ballast_trainer.pipeline.executor import links
from ballast_trainer.pipeline.gradients import squared_norm_once
from ballast_trainer.pipeline.layout import ScheduleRequest
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.tensor_parallel.product import GemmTimer, product
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.layers.trained_layers import CPU, trained_layers

GPU = torch.device("cuda", 1)
PIPELINE = {"microbatches": 2, "globalBatchSize": 4}


def a_world(mesh):
    axes = {
        name: Axis(ranks=tuple(range(size)), index=0)
        for name, size in (("pipeline", 1), ("data", mesh.data), ("tensor", mesh.tensor))
    }
    names = tuple(f"rank-{rank}" for rank in range(mesh.column))
    return World(epoch=1, rank=0, size=mesh.column, processes=names, device=CPU, mesh=mesh, **axes)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2), Mesh(tensor=2)])
def test_the_norm_of_all_gradients_is_waited_for_once(monkeypatch, mesh):
    """A GPU would otherwise stand still once for each of some hundred parameters."""
    layers, backward = trained_layers(TrainingConfig())
    backward(types.SimpleNamespace(scaled=lambda loss: loss))
    gradients = [parameter.grad for parameter in layers.parameters()]
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    waits = []
    for name in ("__float__", "item", "tolist", "cpu"):
        called = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, called=called, name=name: [waits.append(name), called(*args)][1]
        )
    assert squared_norm_once(a_world(mesh), layers) == pytest.approx(expected, rel=1e-5)
    assert waits == ["__float__"]


@pytest.mark.parametrize(("device", "fused"), [(GPU, True), (CPU, True), (torch.device("meta"), None)])
def test_adamw_updates_all_tensors_of_a_layer_in_one_call(monkeypatch, device, fused):
    asked = []

    def adamw(parameters, **options):
        asked.append(options["fused"])
        return types.SimpleNamespace(param_groups=[], state={})

    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    weight = types.SimpleNamespace(device=device, is_floating_point=lambda: True, requires_grad=True)
    layer = types.SimpleNamespace(named_parameters=lambda: [("weight", weight)], named_modules=list)
    Layer(0, layer, TrainingConfig())
    assert asked == [fused]


@pytest.mark.parametrize(("device", "backend", "bound"), [(GPU, "nccl", GPU), (CPU, "gloo", None)])
def test_a_process_group_is_bound_to_its_gpu(monkeypatch, device, backend, bound):
    """So that NCCL connects at once, and groups of some ranks are split from it."""
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: made.append((name, options)))
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: None)
    for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    ranks = tuple(Rank(rank=i, pod=f"pod-{i}", address="10.0.0.1", gpu_type="h100") for i in range(2))
    plan = Plan(job="job", epoch=1, launch=1, directive=Directive.RUN, ranks=ranks)
    join(store=dist.HashStore(), plan=plan, rank=0, device=device, timeout_seconds=5.0)
    ((name, options),) = made
    assert name == backend
    assert options["device_id"] == bound
    assert ("TORCH_NCCL_DUMP_ON_TIMEOUT" in os.environ) == (backend == "nccl")


@pytest.mark.parametrize(
    ("device", "fused", "counts_on"), [("cpu", True, "meta"), ("cpu", False, "cpu"), ("meta", None, "cpu")]
)
def test_a_loaded_optimizer_counts_its_steps_where_its_kernels_do(device, fused, counts_on):
    """Fused kernels read the count on their GPU, others on the host; elsewhere the next update fails."""
    weight = torch.nn.Parameter(torch.zeros(2, device=device))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    saved = torch.tensor(3.0)
    of = torch.empty(2, device="meta")
    assert from_tensor(optimizer, "step", saved, of)[1].device.type == counts_on
    assert from_tensor(optimizer, "exp_avg", saved, of)[1].device.type == "meta"


def test_weights_that_move_stay_on_their_device(monkeypatch):
    """The host reads the description of a message, and no tensor of it."""
    read = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: [read.append(tensor.nbytes), cpu(tensor)][1])
    tensors = {"weight": torch.ones(64, 1024), "mask": torch.rand(64, 1024) < 0.5, "pruned": torch.eye(256)}
    unpacked = unpack(pack(tensors))
    assert all(torch.equal(unpacked[name], tensor) for name, tensor in tensors.items())
    assert sum(read) < 1024


def test_products_are_timed_without_waiting_for_each(monkeypatch):
    """By events, which are read once a step; where a slower device is emulated it is padded to its time."""
    now, waited = itertools.count(), []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(now)

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, end):
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    timer = GemmTimer(GPU)
    timer.running = True
    value, weight = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    product(value, weight, None, selection=None, clock=timer).sum().backward()
    assert not waited
    assert timer.seconds == 2.0 == timer.seconds
    assert len(waited) == 2
    timer.start_step()
    assert timer.seconds == 0.0


@pytest.mark.parametrize("learns", [False, True])
def test_a_loss_and_metrics_compute_where_their_layer_does(learns):
    """Weights of classes, or a frozen network that compares outputs: nothing else would bring them there."""
    loss, metric = nn.CrossEntropyLoss(weight=torch.ones(3)), nn.Linear(3, 1).requires_grad_(False)
    if learns:
        loss.scale = nn.Parameter(torch.ones(1))
    model = Model.from_layers([nn.Linear(3, 3)], loss=loss, metrics={"apart": metric})
    model = ModelState(
        config=JobConfig(total_steps=1),
        definition=model,
        device=torch.device("meta"),
        dynamics=(),
        layers=trained_layers(TrainingConfig())[0],
        meter=Meter(1, CPU, None),
        world=a_world(Mesh()),
        stages=(),
        loss=loss,
    )
    scores = model.definition.loss, model.definition.metrics["apart"]
    assert all(one.is_meta for score in scores for one in (*score.parameters(), *score.buffers()))


def test_samples_are_known_by_what_the_host_has_read():
    """Outputs of frozen layers are kept by the bytes of an input: no batch comes back from the GPU for it."""
    batch = torch.ones(4, 2), torch.zeros(4)
    model = Model(layer_count=1, build_layer=None, loss=None, batch=lambda *_: batch)
    config = read_job_config({"totalSteps": 1, "model": {"name": "gpt"}, "pipeline": PIPELINE})
    batches = Batches(config, model, torch.device("meta"))
    inputs = batches.inputs_on_host(0, a_world(Mesh()))
    assert (inputs.device, batches.of(0, a_world(Mesh()))[0].device.type) == (CPU, "meta")


class ToHost(TorchDispatchMode):
    """Counts the bytes that leave a GPU for the host's memory."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        copied = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if copied and result.device.type == "cpu" and any(one.is_cuda for one in args[:2] if one is not None):
            self.bytes += result.nbytes
        return result


def test_what_is_packed_on_a_gpu_does_not_pass_through_the_host(monkeypatch):
    """Nor does what follows the message; with tensors that are said to be there."""
    monkeypatch.setattr(packing, "_counts_to_send", lambda flats: {})
    with FakeTensorMode(allow_non_fake_inputs=True), ToHost() as to_host:
        tensors = {name: torch.empty(64, 32, device="cuda") for name in ("weight", "moment")}
        message = pack(tensors, ["moment"], device="cuda")
        rest = as_bytes(tensors["moment"])
        assert {message.device.type, rest.device.type} == {"cuda"}
        assert message.numel() < 1.5 * rest.numel() and to_host.bytes == 0
        as_bytes(tensors["moment"].cpu())
        assert to_host.bytes == rest.numel()


def test_links_connect_in_one_order(monkeypatch):
    """NCCL connects in the first message, for which both ranks wait: not on different links at once."""
    asked = []
    monkeypatch.setattr(links, "_made", {})
    monkeypatch.setattr(links, "new_group", tuple)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    for name in ("send", "recv"):
        monkeypatch.setattr(dist, name, lambda _, peer, group, name=name: asked.append((name, peer, group)))
    request = ScheduleRequest(name="1F1B", ranks=3, microbatches=4).one_step()
    for rank in range(3):
        links._made.clear()
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        links.link_groups(request.stage_ranks, request.microbatches, [(0, 1, 2)], (0, 1, 2))
    pairs = [(0, 1), (1, 2)]
    assert asked == [
        ("send", 1, pairs[0]),
        ("recv", 1, pairs[0]),
        ("recv", 0, pairs[0]),
        ("send", 0, pairs[0]),
        ("send", 2, pairs[1]),
        ("recv", 2, pairs[1]),
        ("recv", 1, pairs[1]),
        ("send", 1, pairs[1]),
    ]
