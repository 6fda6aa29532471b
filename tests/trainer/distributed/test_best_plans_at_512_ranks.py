"""Plans of ``best`` for 512 GPUs, as some of their ranks set them up and train a step.

Torch's fake process group stands for the other ranks, fake tensors for memory: what a rank holds, sends and
connects to is compared with what the plan counts on.
"""

import resource

import pytest
import torch
import torch.distributed as dist
import yaml
from ballast_operator.cli.main import main
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import Rank
from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.planning.launch import stages_over
from ballast_policies.planning.partition import Partition
from ballast_trainer.distributed import process_group
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import join
from ballast_trainer.layers.boundaries import Boundary, Sent
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.loop.state import ModelState
from ballast_trainer.models.registry import build_model
from ballast_trainer.pipeline.stages import PipelineBuilder
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.tensor_parallel.layers import split_layer
from click.testing import CliRunner
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.examples import first_daily
from tests.trainer.layers.trained_layers import CPU

RANKS, BLOCKS, DIM, CONTEXT, BATCH = 512, 46, 4096, 1024, 128
BLOCK = 12 * DIM * DIM * 4
"""Bytes of a block's weights; biases and norms are a thousandth of it."""
HIDDEN = CONTEXT * DIM * 4
"""Bytes of a sample's hidden states."""


def planned(tmp_path, memory):
    """The fields of a TrainingJob that ``ballast plan`` prints, for GPUs with so much memory."""
    block = {"forwardSeconds": 0.02, "backwardSeconds": 0.04, "heldBytes": 4 * BLOCK, "weightBytes": BLOCK}
    block |= {"activationBytes": 8 * HIDDEN, "outputBytes": HIDDEN}
    small = {"forwardSeconds": 0.001, "backwardSeconds": 0.002, "outputBytes": HIDDEN}
    profile = {"layers": [small, {"repeat": BLOCKS, **block}, small]}
    cluster = {
        "gpus": [{"type": "large", "count": RANKS, "memoryBytes": memory}],
        "gpusPerServer": 8,
        "bandwidth": {"insideServer": 4e11, "betweenServers": 2.5e10},
    }
    for name, content in (("profile", profile), ("cluster", cluster)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    files = [str(tmp_path / f"{name}.yaml") for name in ("profile", "cluster")]
    options = ["--planner", "best", "--batch-size", str(BATCH), "--output", "yaml"]
    printed = CliRunner().invoke(main, ["plan", *files, *options])
    assert printed.exit_code == 0, printed.output
    return yaml.safe_load(printed.output)["spec"]


class Others:
    """What a rank asks of the other ones."""

    def __init__(self, monkeypatch, rank):
        self.groups, self.sent = [], []
        begin, group, send = dist.init_process_group, dist.new_group, dist.isend

        def fake(backend, **options):
            options.pop("store"), options.pop("device_id")
            begin("fake", store=FakeStore(), **options)

        def counted(ranks=None, **options):
            if ranks is None or rank in ranks:
                self.groups.append(ranks)
            return group(ranks, timeout=options["timeout"])

        def sends(tensor, **options):
            self.sent.append((options["dst"], tensor.nbytes))
            return send(tensor, **options)

        monkeypatch.setattr(dist, "init_process_group", fake)
        monkeypatch.setattr(dist, "new_group", counted)
        monkeypatch.setattr(dist, "isend", sends)
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        monkeypatch.setattr(process_group, "undecided", lambda _: "none")


@pytest.fixture
def leaves():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def model_state(config, rank):
    """As the rank has it; its layers are without memory."""
    ranks = tuple(Rank(rank=i, pod=f"pod-{i}", address="10.0.0.1", gpu_type="large") for i in range(RANKS))
    plan = Plan(job="job", epoch=1, launch=1, directive=Directive.RUN, ranks=ranks)
    mesh = Mesh(tensor=config.parallelism.tensor, data=config.parallelism.data)
    world = join(store=dist.HashStore(), plan=plan, rank=rank, device=CPU, timeout_seconds=5.0, mesh=mesh)
    model = build_model(config.model)
    state = ModelState(
        config=config,
        definition=model,
        device=CPU,
        dynamics=(),
        layers=LayerSet(model, config.training, CPU, lambda index, module: split_layer(module, world.tensor)),
        meter=Meter(model.layer_count, CPU, None),
        world=world,
        stages=(),
        loss=model.loss,
    )
    state.stages = stages_over(Partition(bounds=config.plan.bounds), state.placement(RANKS))
    state.layers.hold(state.layers.make(index) for index in state.held_layers())
    return state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("memory", first_daily([4e9, 12e9]))
@pytest.mark.parametrize("at", first_daily(["middle", "first", "last"]))
def test_a_rank_holds_sends_and_connects_to_what_its_plan_counts_on(
    monkeypatch, tmp_path, leaves, memory, at
):
    """Weights, activations between stages, sums in tensor groups and over replicas; communicators."""
    spec = planned(tmp_path, memory)
    spec["plan"].pop("gpus", None)
    spec["pipeline"].pop("minStages"), spec["pipeline"].pop("maxStages")
    model = {"name": "gpt", "args": {"layers": BLOCKS + 2, "dim": DIM, "heads": 32, "context": CONTEXT}}
    model["args"]["dropout"] = 0.0
    config = JobConfig.from_mapping({"totalSteps": 1, "model": model, **spec})
    tensor, data = config.parallelism.tensor, config.parallelism.data
    positions = RANKS // (tensor * data)
    assert tensor * data * positions == RANKS and positions > 1, spec
    rank = {"first": 0, "middle": RANKS // 2 + tensor, "last": RANKS - 1}[at]
    others = Others(monkeypatch, rank)
    # What the last stage says of its loss, and replicas of the parameters that they have used.
    monkeypatch.setattr(torch.Tensor, "__float__", lambda _: 0.0)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [1.0] * tensor.numel())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    # Fake parameters cannot be swapped for others; they are where they should be.
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = model_state(config, rank)
        blocks = sum(0 < index < BLOCKS + 1 for index in state.held_layers())
        held = sum(one.nbytes for layer in state.layers for one in layer.module.parameters())
        # Embeddings, head, biases and norms are what is not counted.
        assert blocks * BLOCK / tensor < held < blocks * BLOCK / tensor * 1.02 + 2 * 1300 * DIM * 4
        size = BATCH // data // state.microbatches
        between = Boundary((Sent((size, CONTEXT, DIM // tensor), torch.float32, True),))
        monkeypatch.setattr(PipelineBuilder, "probe_partition", lambda *_, **__: (between,) * (positions - 1))
        monkeypatch.setattr(ModelState, "_shape_of", lambda *_: None)
        monkeypatch.setattr(ModelState, "_loss", lambda state, output, target: state.loss(output, target))
        state.rebuild(0)
        inputs = torch.zeros(BATCH // data, CONTEXT, dtype=torch.int64)
        monkeypatch.setattr(ModelState, "batch", lambda *_: (inputs, inputs))
        state.train_pipeline(0)
        state.complete_gradients()
    place, each = state.world.mesh.place(rank), size * HIDDEN
    neighbours = (place.position > 0) + (place.position < positions - 1)
    assert len(others.sent) == neighbours * state.microbatches
    assert {bytes for _, bytes in others.sent} == {each // tensor}
    column = tensor * data
    assert {target for target, _ in others.sent} <= {rank - column, rank + column}
    # A block sums two activations forward, and two gradients backward.
    assert state.world.tensor.bytes["all_reduce"] == (tensor > 1) * 4 * each * blocks * state.microbatches
    assert (data > 1) * held <= state.world.data.bytes["all_reduce"] <= (data > 1) * held * 1.001
    # Its lines of the mesh, all ranks for what waits for storage, and a link each way with each neighbour.
    assert len(others.groups) == 1 + (data > 1) + (tensor > 1) + 1 + 2 * neighbours
