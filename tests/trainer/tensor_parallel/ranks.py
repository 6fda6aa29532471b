"""Ranks of a tensor group as real processes that talk over gloo, for the tests of its parts."""

import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from ballast_policies.contract.job.training import TrainingConfig
from ballast_policies.contract.messages import Stage
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import join
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.slicing import slicings
from ballast_trainer.models.gpt import Block, build_gpt
from ballast_trainer.pipeline.layout import ScheduleRequest
from ballast_trainer.pipeline.stages import PipelineBuilder
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.tensor_parallel.layers import split_layer
from ballast_trainer.tensor_parallel.migration import begin_migration, finish_migration, numbers_per_unit
from ballast_trainer.tensor_parallel.parallel_pair import pairs

from tests.support.gang import forks
from tests.support.plans import local_plan
from tests.support.waiting import WAIT_SECONDS
from tests.trainer.models import families

DIM, HEADS = 24, 12


def on_ranks(function, size, *arguments, mesh=None):
    """``function(world, *arguments)`` on ``size`` ranks; what each returns, by rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = local_plan([f"pod-{number}" for number in range(size)], network=1)
        arguments = (folder, plan, mesh or Mesh(tensor=size), function, arguments)
        processes = [forks().Process(target=_rank, args=(rank, *arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(WAIT_SECONDS)
            process.kill()
        errors = [path.read_text() for path in folder.glob("error-*")]
        assert not errors, errors[0]
        return [torch.load(folder / f"result-{rank}") for rank in range(size)]


def _rank(rank, folder, plan, mesh, function, arguments):
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(os.fspath(folder / "store"), len(plan.ranks))
        world = join(
            store=store,
            plan=plan,
            rank=rank,
            device=torch.device("cpu"),
            timeout_seconds=WAIT_SECONDS,
            mesh=mesh,
        )
        torch.save(function(world, *arguments), folder / f"result-{rank}")
        world.leave()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise


def held_layers(model, bounds, rank, config=None):
    """The layers of one rank of a partition, after a step of their optimizers."""
    layers = LayerSet(model, config or TrainingConfig(), torch.device("cpu"), lambda index, module: module)
    layers.hold(layers.make(index) for index in range(bounds[rank], bounds[rank + 1]))
    for layer in layers:
        for parameter in layer.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        layer.handed_to_masters()
        layer.optimizer.step()
    return layers


def whole_block(kind):
    """A block with the same weights on every rank, and two microbatches.

    Args:
        kind: dropout of our block, or a family of transformers.
    """
    torch.manual_seed(3)
    if isinstance(kind, float):
        block = Block(DIM, HEADS, kind)
    else:
        from ballast_trainer.models.hugging_face import from_config

        sizes = {"hidden_size": DIM, "num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS}
        if kind == "gpt2":
            sizes = {"n_embd": DIM, "n_head": HEADS}
        if kind in ("deepseek_v2", "longcat_flash", "bitnet"):
            sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
        if kind == "bitnet":
            sizes |= {"head_dim": DIM // HEADS}
        arguments = families.arguments(kind) | sizes
        block = from_config(**arguments).build_layer(1)
    values = [torch.randn(2, 6, DIM) for _ in range(2)]
    return block, values


def train_step(block, values):
    """Outputs, input gradients and the loss's gradients of a step; dropout seeded by microbatch."""
    outputs, inputs = [], []
    for number, value in enumerate(values):
        torch.manual_seed(100 + number)
        leaf = value.clone().requires_grad_()
        output = block(leaf)
        (output * value).square().sum().backward()
        outputs.append(output.detach())
        inputs.append(leaf.grad)
    return torch.stack(outputs), torch.stack(inputs)


def block_gradients(world, block):
    """Gradients of all parameters by name, whole."""
    cut = slicings(block)
    found = {}
    for name, parameter in block.named_parameters():
        parts = world.tensor.all_gather(parameter.grad)
        found[name] = cut[name].whole(parts) if name in cut else parts[0]
    return found


def step_of_a_block(world, fractions, kind):
    """One step of a tensor-parallel block in which ranks hand over ``fractions`` of their work."""
    block, values = whole_block(kind)
    block = split_layer(block, world.tensor)
    held = [pairs([block])]
    world.tensor.calls.clear()
    begin_migration(held, fractions, world.tensor, microbatches=len(values))
    helped = [sum(units.count for units in pair.helped) for pair in held[0]]
    world.tensor.bytes.clear()
    outputs, inputs = train_step(block, values)
    calls = dict(world.tensor.calls)
    finish_migration(held)
    return {
        "outputs": outputs,
        "inputs": inputs,
        "gradients": block_gradients(world, block),
        "calls": calls,
        "reduced": world.tensor.bytes["all_reduce"],
        "numbers_per_unit": [numbers_per_unit(pair) for pair in held[0]],
        "handed_over": [pair.handed_over for pair in held[0]],
        "helped": helped,
    }


def pipelined_step(world, scatter_gather):
    """A step of a small GPT over pipeline x tensor; what each rank sends to other stages, in bytes."""
    model = build_gpt(layers=5, dim=DIM, heads=4, context=6, dropout=0.1)
    config = TrainingConfig()
    layers = LayerSet(model, config, world.device, lambda _, module: split_layer(module, world.tensor))
    bounds = (0, 2, 5)
    stages = tuple(
        Stage(rank=rank, first_layer=bounds[rank], end_layer=bounds[rank + 1]) for rank in range(2)
    )
    held = range(bounds[world.position], bounds[world.position + 1])
    layers.hold(layers.make(index) for index in held)
    meter = Meter(model.layer_count, world.device, None)
    builder = PipelineBuilder(
        stages=stages,
        schedule=ScheduleRequest(name="1F1B", ranks=world.positions, microbatches=2),
        rank=world.position,
        layers=layers,
        meter=meter,
        loss=model.loss,
        line=world.pipeline,
        lines=world.mesh.lines("position", world.size),
        tensor=world.tensor if scatter_gather else None,
    )
    batch = model.batch(0, 0, 4)
    pipeline = builder.build(builder.probe_partition(batch, world.gather))
    sent = []
    send = dist.isend

    def counted(tensor, **named):
        sent.append(tensor.nbytes)
        return send(tensor, **named)

    # Where stages send; this process ends after the step.
    dist.isend = counted
    world.tensor.bytes.clear()
    loss = pipeline.run(lambda: batch)
    gradients = {
        f"{layer.index}.{name}": parameter.grad
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }
    return {"loss": loss, "sent": sent, "gradients": gradients, "gathered": world.tensor.bytes["all_gather"]}
