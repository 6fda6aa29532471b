"""Profiler of a job's layers in one process, without a pipeline."""

import dataclasses
import gc
import logging
from typing import Any

import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import PipelineConfig
from ballast_policies.contract.messages import Stage
from ballast_policies.planning.profile import repeated_layers

from ballast_trainer.device import choose_device
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.mixture_of_experts import experts_row
from ballast_trainer.dynamics.registry import build_dynamics
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.optimize import squared_gradient_norm
from ballast_trainer.layers.precision import LossScale, check_precision, computing_in
from ballast_trainer.loop.state import ModelState
from ballast_trainer.models.protocol import Model
from ballast_trainer.profiling.activations import SavedTensors, weight_gradient_bytes
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.tensor_parallel.layers import split_layer
from ballast_trainer.trees import Tree, chunks, mapped

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class _OneOfGroup(Axis):
    """A tensor group of which this process is a rank, and from whose others nothing comes."""

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        self.count("all_reduce", tensor.nbytes)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.count("all_gather", tensor.nbytes)
        return [tensor] * self.size


def layer_rows(config: dict[str, Any], *, steps: int, at_step: int) -> dict[str, Any]:
    """Seconds and bytes of each layer, in the form that ``ballast plan`` takes.

    Forward and backward are of one microbatch, the optimizer's seconds of one step.  Activations
    are the bytes kept from the forward to the backward, the loss's with the last layer's; with
    ``recompute`` the input alone of a layer that is repeated.  The measurement is that of a running job; of
    ranks that share layers (``parallelism.tensor``) it is one's part, and what they all-reduce.  What a
    microbatch takes whatever its size is told by smaller ones, and is 0 where there are none or the layers
    cannot take them.

    The median of so many steps counts, with the dynamic changes of ``at_step``, from the initial weights.

    Raises:
        ConfigurationError: a field cannot work.
    """
    torch.set_num_threads(1)
    job = ValidatedJob.from_mapping(config).with_ties()
    group = _OneOfGroup(ranks=tuple(range(job.config.parallelism.tensor)))
    pipeline = job.config.pipeline
    size = pipeline.global_batch_size // pipeline.microbatches
    smaller = next((size // by for by in range(2, size + 1) if size % by == 0), 0)
    overhead = [0.0] * job.model.layer_count
    if smaller:
        more = pipeline.replace(microbatches=pipeline.global_batch_size // smaller)
        other = job.config.replace(pipeline=more)
        try:
            of_smaller = _seconds(_measured(job, other, group, steps=steps, at_step=at_step))
        except Exception as error:  # batch norms want several samples; a job's own error is raised below
            logger.warning("overheadSeconds are 0: microbatches of %d samples fail: %s", smaller, error)
            smaller = 0
        job = ValidatedJob.from_mapping(config).with_ties()  # from the initial weights
        gc.collect()  # the memory may have no room for a second model
    model = _measured(job, job.config, group, steps=steps, at_step=at_step)
    if smaller:
        each = zip(_seconds(model), of_smaller, strict=True)
        overhead = [overhead_seconds((size, large), (smaller, small)) for large, small in each]
    costs, counted = model.profile.costs(), model.profile.bytes()
    assert costs is not None and counted is not None
    kept, gradients, reduced = _passing_bytes(model, at_step, group)
    repeats = repeated_layers(job.model.layer_count, job.config.training.repeated)
    rows = [
        {
            "name": f"layer {layer.index}",
            "forwardSeconds": costs.forward[layer.index] / pipeline.microbatches,
            "backwardSeconds": costs.backward[layer.index] / pipeline.microbatches,
            "overheadSeconds": overhead[layer.index],
            "optimizerSeconds": costs.optimizer[layer.index],
            "heldBytes": layer.byte_count(),
            "weightBytes": sum(parameter.nbytes for parameter in layer.module.parameters()),
            "activationBytes": counted.activation_bytes[layer.index],
            "repeatedBytes": kept[layer.index] if repeats[layer.index] else 0,
            "gradientBytes": gradients[layer.index],
            "outputBytes": model.meter.output_bytes[layer.index],
            **({"reducedBytes": reduced[layer.index]} if group.size > 1 else {}),
            **experts_row(layer.module),
        }
        for layer in model.layers
    ]
    return {"microbatchSize": size, "tensor": group.size, "layers": rows}


def _measured(job: ValidatedJob, config: JobConfig, group: Axis, *, steps: int, at_step: int) -> ModelState:
    """The job, as ``config`` has it, after so many steps."""
    loss_scale = LossScale(config.training.precision)
    model = _whole_model(config, job.model, loss_scale, group)
    for step in range(at_step + 1):
        for dynamic in model.dynamics:
            dynamic.apply(step, model.layers, model.world)
    model.rebuild(at_step)
    for number in range(steps + 1):
        model.meter.start_step(at_step + number)
        _step(model, at_step, loss_scale.value)
        if number:
            # The first step is slower: memory is touched for the first time.
            model.profile.add(model.meter.seconds(), model.meter.bytes)
    return model


def _seconds(model: ModelState) -> list[float]:
    """Seconds by layer, of one microbatch, forward and backward."""
    costs = model.profile.costs()
    assert costs is not None
    # As rows have them: no rounding makes the overhead more than both.
    both = zip(costs.forward, costs.backward, strict=True)
    return [f / model.microbatches + b / model.microbatches for f, b in both]


def overhead_seconds(large: tuple[int, float], small: tuple[int, float]) -> float:
    """Seconds at no samples, on the line through two of (samples, seconds); 0 to ``large``'s."""
    each = (large[1] - small[1]) / (large[0] - small[0])
    return min(max(0.0, large[1] - each * large[0]), large[1])


def _whole_model(config: JobConfig, model: Model, loss_scale: LossScale, group: Axis) -> ModelState:
    """The job on this process alone; how it is to be cut and scheduled does not matter here."""
    pipeline = PipelineConfig(
        microbatches=config.pipeline.microbatches, global_batch_size=config.pipeline.global_batch_size
    )
    device = choose_device(0)
    check_precision(config.training.precision, device)
    dynamics = build_dynamics(config.dynamics, model.layer_count, model.family)

    def prepare(index: int, module: torch.nn.Module) -> torch.nn.Module:
        for dynamic in dynamics:
            module = dynamic.prepare(index, module)
        return split_layer(module, group)

    whole = ModelState(
        config=config.replace(pipeline=pipeline),
        definition=model,
        device=device,
        dynamics=dynamics,
        layers=LayerSet(model, config.training, device, prepare),
        meter=Meter(model.layer_count, device, None),
        world=World(epoch=1, rank=0, size=1, processes=("local",), device=device),
        stages=(Stage(rank=0, first_layer=0, end_layer=model.layer_count),),
        loss=loss_scale.scaled(model.loss),
    )
    whole.layers.hold(whole.layers.make(index) for index in range(model.layer_count))
    return whole


def _passing_bytes(model: ModelState, step: int, group: Axis) -> tuple[list[int], list[int], list[int]]:
    """Bytes by layer of one microbatch: kept by its forward, flowing into its weights, all-reduced.

    Backward a tensor group all-reduces as much as forward.
    """
    inputs, _ = model.batch(step)
    value: Tree = chunks(inputs, model.microbatches)[0]
    kept, waiting, reduced = [], [], []
    for layer in model.layers:
        value = mapped(_learning, layer.taken(value))
        counter, before = SavedTensors(value), group.bytes.total()
        with counter.saving(layer.index), computing_in(model.config.training.precision, model.device):
            output = layer.module(value)
        kept.append(counter.count([layer.module]).get(layer.index, 0))
        waiting.append(weight_gradient_bytes(output))
        reduced.append(2 * (group.bytes.total() - before))
        value = output
    return kept, waiting, reduced


def _learning(value: torch.Tensor) -> torch.Tensor:
    # No leaf, so that layers may change it in place.
    return value.detach().requires_grad_().clone() if value.is_floating_point() else value


def _step(model: ModelState, step: int, loss_scale: float) -> None:
    assert model.pipeline is not None
    model.pipeline.run(lambda: model.batch(step))
    model.complete_gradients()
    model.optimizer_step(step, squared_gradient_norm(model.layers.parameters()), loss_scale)
