"""The only file that knows torch.distributed.pipelining: stages and schedules from a partition.

A pipeline is rebuilt whenever layers move or freeze, since torch fixes a stage's module when it is
made.  One rank alone runs its microbatches in a plain loop and loads none of torch's pipelining,
whose import takes seconds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from ballast_policies.contract import Stage
from ballast_policies.planning.schedules import Schedule

from ballast_trainer.data.batch import Batch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.layer_stack import Layer, LayerSet, LayerStack
from ballast_trainer.pipeline.executor.pipelines import AsynchronousPipeline, ExecutedPipeline
from ballast_trainer.pipeline.layout import holders_of, is_asynchronous, schedule_of, schedule_of_run
from ballast_trainer.profiling.profile import Meter
from ballast_trainer.tensor_parallel.exchange import gather, scatter

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_SINGLE_STAGE = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}
"""Schedules with one stage a rank, as classes of torch.distributed.pipelining. All others are carried
out action by action by its runtime."""


class Pipeline(Protocol):
    """Runs one step's microbatches through this rank's stages."""

    def prepare(self, batch: Batch) -> None:
        """Agree on shapes with the neighbouring stages; collective, once after it is built."""

    def run(self, batch: Batch) -> float | None:
        """Forward and backward of a whole batch; gradients are left in the parameters.

        Returns:
            The mean loss on the rank of the last stage, None elsewhere.
        """


class _MeteredLoss:
    """The loss as part of the last layer's forward, measured with it."""

    def __init__(self, loss: Loss, meter: Meter, layer: int) -> None:
        self._loss, self._meter, self._layer = loss, meter, layer

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        meter, kept = self._meter, self._meter.kept
        meter.begin(0, meter.forward, self._layer)
        if kept is None:
            value = self._loss(output, target)
        else:
            # Of the microbatch whose forward has just ended.
            kept.add_part(target)
            with kept.saving(self._layer):
                value = self._loss(output, target)
            meter.add_kept()
            meter.kept = None
        meter.end()
        return value


class LocalPipeline:
    """All layers on one rank: a loop over the microbatches."""

    def __init__(self, stack: LayerStack, meter: Meter, loss: Loss, microbatches: int) -> None:
        self._stack, self._meter, self._microbatches = stack, meter, microbatches
        self._loss = _MeteredLoss(loss, meter, stack.indices[-1])

    def prepare(self, batch: Batch) -> None:
        """Nothing to agree on."""

    def run(self, batch: Batch) -> float | None:
        """See :class:`Pipeline`."""
        inputs, targets = (tensor.chunk(self._microbatches) for tensor in batch)
        losses = []
        for index, (source, target) in enumerate(zip(inputs, targets, strict=True)):
            self._meter.begin(index, self._meter.forward, None)
            output = self._stack(source)
            self._meter.end()
            loss = self._loss(output, target)
            self._meter.begin(index, self._meter.backward, self._stack.indices[-1])
            if loss.requires_grad:
                loss.backward()
            self._meter.end()
            losses.append(loss.detach())
        for parameter in self._stack.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self._microbatches)
        return float(torch.stack(losses).mean())


class TorchPipeline:
    """A schedule of torch.distributed.pipelining over this rank's stages."""

    def __init__(self, schedule: Any, stages: list[Any], microbatches: int) -> None:
        self._schedule, self._stages = schedule, stages
        self._first = any(stage.is_first for stage in stages)
        self._last = any(stage.is_last for stage in stages)
        self._microbatches = microbatches

    def prepare(self, batch: Batch) -> None:
        """Let torch infer the shapes now, so that a reshape's pause counts it and the first step does not."""
        inputs, targets = (tensor.chunk(self._microbatches)[0] for tensor in batch)
        arguments = (inputs,) if self._first else ()
        for stage in self._stages:
            stage.has_backward = True
        initialize = getattr(self._schedule, "_initialize_stages", None) or self._schedule._initialize_stage
        initialize(arguments, {}, targets if self._last else None)

    def run(self, batch: Batch) -> float | None:
        """See :class:`Pipeline`."""
        losses: list[torch.Tensor] = []
        arguments = (batch[0],) if self._first else ()
        target = batch[1] if self._last else None
        self._schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().mean()) if self._last else None


def _metered_stage_class() -> Any:
    from torch.distributed.pipelining import PipelineStage

    class MeteredStage(PipelineStage):
        """A stage that tells the meter when a microbatch's work begins and ends."""

        meter: Meter
        last_layer: int
        weight_shares: dict[int, float]
        stack: LayerStack

        def _whole_backward(self) -> bool:
            # Torch's split backward starts from the stage's input: above frozen layers that has no gradient.
            frozen = any(not parameter.requires_grad for parameter in self.stack.parameters())
            return frozen or not (self.is_first or self.stack.input_learns)

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self.meter.begin(fwd_chunk_id, self.meter.forward, None)
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            self.meter.end()
            return output

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not self.has_backward:
                return
            # The check goes through all parameters: made only where it matters.
            if not kwargs.get("full_backward", True) and self._whole_backward():
                kwargs["full_backward"] = True
            self.meter.begin(bwd_chunk_id, self.meter.backward, self.last_layer)
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.meter.end()

        def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if self._whole_backward():
                return
            # One call for the weights of all layers: told apart by their sizes.
            before = self.meter.backward[self.last_layer]
            self.meter.begin(bwd_chunk_id, self.meter.backward, self.last_layer)
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.meter.end()
            seconds = self.meter.backward[self.last_layer] - before
            self.meter.backward[self.last_layer] = before
            for layer, share in self.weight_shares.items():
                self.meter.backward[layer] += share * seconds

        def _to_tensor(self, arg: Any) -> torch.Tensor:
            # Torch infers shapes from uninitialised memory; layers that look at their data need sane one.
            tensor: torch.Tensor = super()._to_tensor(arg)
            if tensor is not arg and not isinstance(arg, torch.Tensor):
                with torch.no_grad():
                    tensor.zero_()
            return tensor

    return MeteredStage


_stage_class: Any = None


def preload() -> None:
    """Import torch's pipelining and make the stage class; takes seconds, so do it while waiting."""
    global _stage_class  # noqa: PLW0603 - a class can be made once only, after a slow import
    if _stage_class is None:
        _stage_class = _metered_stage_class()


def build_pipeline(
    *,
    stages: Sequence[Stage],
    rank: int,
    world_size: int,
    layers: LayerSet,
    meter: Meter,
    loss: Loss,
    seed: int,
    microbatches: int,
    schedule: str,
    device: torch.device,
    group: Any = None,
    replicas: Sequence[int] = (),
    stages_per_rank: int | None = None,
    tensor: Axis | None = None,
) -> Pipeline:
    """The pipeline of one rank; every rank must build it at the same step.

    ``rank`` and ``world_size`` count pipeline positions; ``group`` are the ranks of this pipeline,
    None for all.  Replicas of stages, and schedules without a flush, are carried out by our own
    executor, all else by torch.  The ranks of ``tensor`` send a part of the activations each.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    metered = _MeteredLoss(loss, meter, stages[-1].end_layer - 1)
    holders = holders_of(stages, replicas, world_size)
    if is_asynchronous(schedule) or any(len(ranks) > 1 for ranks in holders):
        stacks = {
            number: _stack(layers, stage, meter, seed, device)
            for number, stage in enumerate(stages)
            if rank in holders[number]
        }

        def one_step(name: str) -> Schedule:
            return schedule_of(name, ranks=world_size, microbatches=microbatches, replicas=replicas)

        if not is_asynchronous(schedule):
            return ExecutedPipeline(
                one_step(schedule), rank=rank, stacks=stacks, meter=meter, loss=metered, device=device
            )
        counts = {"ranks": world_size, "microbatches": microbatches}
        return AsynchronousPipeline(
            one_step("1F1B"),
            lambda steps: schedule_of_run(schedule, **counts, steps=steps, replicas=replicas),
            rank=rank,
            stacks=stacks,
            meter=meter,
            loss=metered,
            device=device,
        )
    if world_size == 1:
        stack = LayerStack([layers[index] for index in layers.indices()], meter, seed, device)
        stack.train()
        return LocalPipeline(stack, meter, loss, microbatches)
    preload()
    mine = []
    for number, stage in enumerate(stages):
        if stage.rank == rank:
            held = [layers[index] for index in range(stage.first_layer, stage.end_layer)]
            stack = _stack(layers, stage, meter, seed, device)
            if tensor is not None and tensor.size > 1:
                stack.entrance = functools.partial(gather, axis=tensor) if number > 0 else None
                stack.exit = functools.partial(scatter, axis=tensor) if number < len(stages) - 1 else None
            made = _stage_class(stack, number, len(stages), device, group=group)
            made.meter, made.last_layer = meter, stack.indices[-1]
            made.weight_shares = _weight_shares(held)
            made.stack = stack
            mine.append(made)
    if schedule in _SINGLE_STAGE:
        from torch.distributed import pipelining

        single = getattr(pipelining, _SINGLE_STAGE[schedule])
        built = single(mine[0], n_microbatches=microbatches, loss_fn=metered)
    else:
        from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

        built = _PipelineScheduleRuntime(mine, n_microbatches=microbatches, loss_fn=metered)
        plan = schedule_of(
            schedule, ranks=world_size, microbatches=microbatches, stages_per_rank=stages_per_rank
        )
        built._prepare_schedule_with_comms(
            {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(plan.actions)}
        )
    return TorchPipeline(built, mine, microbatches)


def _stack(layers: LayerSet, stage: Stage, meter: Meter, seed: int, device: torch.device) -> LayerStack:
    held = [layers[index] for index in range(stage.first_layer, stage.end_layer)]
    stack = LayerStack(held, meter, seed, device)
    stack.train()
    return stack


def _weight_shares(held: list[Layer]) -> dict[int, float]:
    sizes = {
        layer.index: sum(p.numel() for p in layer.module.parameters() if p.requires_grad) for layer in held
    }
    total = sum(sizes.values())
    return {index: size / total for index, size in sizes.items()} if total else {}
