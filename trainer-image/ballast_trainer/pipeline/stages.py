"""The pipeline of one rank, built from stages and a schedule.

This is the only file that uses torch.distributed.pipelining.  A pipeline is rebuilt whenever layers
move or freeze, since torch fixes a stage's module when it is made.  One rank alone runs its
microbatches in a plain loop and imports none of torch's pipelining, which takes seconds.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from ballast_policies.contract import Stage

from ballast_trainer.data.batch import Batch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.layer_stack import Layer, LayerSet, LayerStack
from ballast_trainer.pipeline.executor.pipelines import AsynchronousPipeline, ExecutedPipeline
from ballast_trainer.pipeline.layout import ScheduleRequest, holders_of
from ballast_trainer.profiling.profile import Meter
from ballast_trainer.tensor_parallel.exchange import gather, scatter

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_SINGLE_STAGE = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}
"""Schedules with one stage a rank, as classes of torch.distributed.pipelining. All others
run action by action in its runtime."""


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
        """Let torch infer the shapes now, as part of a reshape's pause and not of the first step."""
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
            # One call for the weights of all layers: split by their sizes.
            before = self.meter.backward[self.last_layer]
            self.meter.begin(bwd_chunk_id, self.meter.backward, self.last_layer)
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.meter.end()
            seconds = self.meter.backward[self.last_layer] - before
            self.meter.backward[self.last_layer] = before
            for layer, share in self.weight_shares.items():
                self.meter.backward[layer] += share * seconds

        def _to_tensor(self, arg: Any) -> torch.Tensor:
            # Torch infers shapes from uninitialised memory; layers that look at their data need valid values.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBuilder:
    """Builds the pipeline of one rank; every rank must build its own at the same step.

    Replicas of stages, and schedules without a flush, run in our own executor, all others in torch's.

    Attributes:
        stages: the partition; their ranks count pipeline positions.
        schedule: the schedule, over all positions of the pipeline.
        rank: position of this rank.
        layers: the layers that this rank holds.
        meter: is told when a microbatch's work begins and ends.
        loss: of one microbatch.
        group: the ranks of this pipeline; None: all.
        tensor: ranks that send a part of the activations each; None: this rank sends all.
    """

    stages: Sequence[Stage]
    schedule: ScheduleRequest
    rank: int
    layers: LayerSet
    meter: Meter
    loss: Loss
    group: Any = None
    tensor: Axis | None = None

    def build(self) -> Pipeline:
        """The pipeline; collective over the pipeline's ranks.

        Raises:
            ConfigurationError: the counts do not suit the schedule.
        """
        holders = holders_of(self.stages, self.schedule.replicas, self.schedule.ranks)
        if self.schedule.asynchronous or any(len(ranks) > 1 for ranks in holders):
            return self._executed(holders)
        if self.schedule.ranks == 1:
            stack = self._stack(self.layers.indices())
            return LocalPipeline(stack, self.meter, self.loss, self.schedule.microbatches)
        return self._of_torch()

    def _executed(self, holders: Sequence[Sequence[int]]) -> ExecutedPipeline:
        schedule = self.schedule
        common: dict[str, Any] = {
            "rank": self.rank,
            "stacks": {
                number: self._stack(range(stage.first_layer, stage.end_layer))
                for number, stage in enumerate(self.stages)
                if self.rank in holders[number]
            },
            "meter": self.meter,
            "loss": self._metered_loss(),
            "device": self.layers.device,
        }
        if not schedule.asynchronous:
            return ExecutedPipeline(schedule.one_step(), **common)
        flush = dataclasses.replace(schedule, name="1F1B", stages_per_rank=None)
        return AsynchronousPipeline(flush.one_step(), schedule.run_of, **common)

    def _of_torch(self) -> TorchPipeline:
        preload()
        mine = [
            self._torch_stage(number, stage)
            for number, stage in enumerate(self.stages)
            if stage.rank == self.rank
        ]
        schedule = self.schedule
        settings = {"n_microbatches": schedule.microbatches, "loss_fn": self._metered_loss()}
        built: Any
        if schedule.name in _SINGLE_STAGE:
            from torch.distributed import pipelining

            built = getattr(pipelining, _SINGLE_STAGE[schedule.name])(mine[0], **settings)
        else:
            from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

            built = _PipelineScheduleRuntime(mine, **settings)
            actions = enumerate(schedule.one_step().actions)
            built._prepare_schedule_with_comms(
                {rank: [_Action.from_str(str(action)) for action in row] for rank, row in actions}
            )
        return TorchPipeline(built, mine, schedule.microbatches)

    def _torch_stage(self, number: int, stage: Stage) -> Any:
        held = range(stage.first_layer, stage.end_layer)
        stack = self._stack(held)
        if self.tensor is not None and self.tensor.size > 1:
            last = len(self.stages) - 1
            stack.entrance = functools.partial(gather, axis=self.tensor) if number > 0 else None
            stack.exit = functools.partial(scatter, axis=self.tensor) if number < last else None
        made = _stage_class(stack, number, len(self.stages), self.layers.device, group=self.group)
        made.meter, made.last_layer = self.meter, stack.indices[-1]
        made.weight_shares = _weight_shares([self.layers[index] for index in held])
        made.stack = stack
        return made

    def _metered_loss(self) -> _MeteredLoss:
        return _MeteredLoss(self.loss, self.meter, self.stages[-1].end_layer - 1)

    def _stack(self, indices: Iterable[int]) -> LayerStack:
        held = [self.layers[index] for index in indices]
        stack = LayerStack(held, self.meter, self.layers.seed, self.layers.device)
        stack.train()
        return stack


def _weight_shares(held: list[Layer]) -> dict[int, float]:
    sizes = {
        layer.index: sum(p.numel() for p in layer.module.parameters() if p.requires_grad) for layer in held
    }
    total = sum(sizes.values())
    return {index: size / total for index, size in sizes.items()} if total else {}
