"""The only file that knows torch.distributed.pipelining: stages and schedules from a partition.

A pipeline is rebuilt whenever layers move or freeze, since torch fixes a stage's module when it is
made.  One rank alone runs its microbatches in a plain loop and loads none of torch's pipelining,
whose import takes seconds.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from ballast_policies.contract import Stage
from torch import nn

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Batch
from ballast_trainer.runtime.layers import LayerSet, LayerStack
from ballast_trainer.runtime.profile import Meter

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SCHEDULES = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}
"""Schedules by their name in the configuration, as classes of torch.distributed.pipelining."""


def check_schedule(name: str) -> None:
    """Refuse a schedule that does not exist.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if name not in SCHEDULES:
        raise ConfigurationError.unknown("pipeline.schedule", name, SCHEDULES)


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
        self._meter.begin(0, self._meter.forward, self._layer)
        value = self._loss(output, target)
        self._meter.end()
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
    """A schedule of torch.distributed.pipelining over this rank's stage."""

    def __init__(self, schedule: Any, *, first: bool, last: bool, microbatches: int) -> None:
        self._schedule, self._first, self._last = schedule, first, last
        self._microbatches = microbatches

    def prepare(self, batch: Batch) -> None:
        """Let torch infer the shapes now, so that a reshape's pause counts it and the first step does not."""
        inputs, targets = (tensor.chunk(self._microbatches)[0] for tensor in batch)
        arguments = (inputs,) if self._first else ()
        self._schedule._stage.has_backward = True
        self._schedule._initialize_stage(arguments, {}, targets if self._last else None)

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

        @contextlib.contextmanager
        def _metered(self, microbatch: int, into: list[float], layer: int | None) -> Iterator[None]:
            self.meter.begin(microbatch, into, layer)
            yield
            self.meter.end()

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            with self._metered(fwd_chunk_id, self.meter.forward, None):
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not self.has_backward:
                return
            with self._metered(bwd_chunk_id, self.meter.backward, self.last_layer):
                super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

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
) -> Pipeline:
    """The pipeline of one rank; every rank must build it at the same step.

    Raises:
        ConfigurationError: the schedule is unknown.
    """
    check_schedule(schedule)
    held = [layers[index] for index in layers.indices()]
    stack = LayerStack(held, meter, seed, device)
    stack.train()
    if world_size == 1:
        return LocalPipeline(stack, meter, loss, microbatches)
    preload()
    from torch.distributed import pipelining

    number = next(index for index, stage in enumerate(stages) if stage.rank == rank)
    stage = _stage_class(stack, number, len(stages), device)
    stage.meter, stage.last_layer = meter, stack.indices[-1]
    metered = _MeteredLoss(loss, meter, stack.indices[-1])
    built = getattr(pipelining, SCHEDULES[schedule])(stage, n_microbatches=microbatches, loss_fn=metered)
    return TorchPipeline(built, first=number == 0, last=number == len(stages) - 1, microbatches=microbatches)


def trainable(module: nn.Module) -> bool:
    """Whether any parameter of the module learns."""
    return any(parameter.requires_grad for parameter in module.parameters())
