"""Schedules of torch.distributed.pipelining over the stages of one rank.

This is the only file that uses torch.distributed.pipelining.  A pipeline is rebuilt whenever layers
move or freeze, since torch fixes a stage's module when it is made.  Shapes are known from the trial
of the partition, so torch infers none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ballast_policies.planning.schedules import SCHEDULES, Schedule

from ballast_trainer.data.batch import Batch
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.profiling.meter import Meter


class TorchPipeline:
    """A schedule of torch.distributed.pipelining over this rank's stages."""

    def __init__(self, schedule: Any, stages: list[Any]) -> None:
        self._schedule = schedule
        self._first = any(stage.is_first for stage in stages)
        self._last = any(stage.is_last for stage in stages)

    def run(self, batch: Callable[[], Batch]) -> float | None:
        """See :class:`~ballast_trainer.pipeline.stages.Pipeline`."""
        losses: list[torch.Tensor] = []
        inputs, targets = batch() if self._first or self._last else (None, None)
        arguments = (inputs,) if self._first else ()
        target = targets if self._last else None
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
        meets: bool

        def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
            # All ranks vote for the shapes that the trial has found. The vote goes through the pipeline
            # and back, which connects neighbours: once per process group is enough.
            if self.meets:
                return super()._warmup_forward_vote(has_backward, received_acc)
            return torch.ones(1, dtype=torch.int32)

        def _warmup_backward_result(self, received_result: Any = None) -> torch.Tensor:
            if self.meets:
                return super()._warmup_backward_result(received_result)
            return torch.ones(1, dtype=torch.int32)

        def _whole_backward(self) -> bool:
            return not (self.is_first or self.stack.input_learns) or _has_frozen(self.stack)

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
            self.meter.begin(bwd_chunk_id, self.meter.backward, self.weight_shares)
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.meter.end()

    return MeteredStage


_stage_class: Any = None
_META = torch.device("meta")


def preload() -> None:
    """Import torch's pipelining and make the stage class; takes seconds, so do it while waiting."""
    global _stage_class  # noqa: PLW0603 - a class can be made once only, after a slow import
    if _stage_class is None:
        _stage_class = _metered_stage_class()


def build_torch_pipeline(
    schedule: Schedule,
    stacks: dict[int, LayerStack],
    boundaries: Sequence[Boundary],
    *,
    name: str,
    meter: Meter,
    loss: Any,
    group: Any,
    device: torch.device,
    meets: bool = True,
) -> TorchPipeline:
    """The pipeline of one rank; collective over the pipeline's ranks.

    Args:
        schedule: the order of all ranks' actions.
        stacks: by stage, those of this rank.
        boundaries: between all stages.
        name: the schedule's.
        meter: is told when a microbatch's work begins and ends.
        loss: of one microbatch.
        group: the pipeline's ranks; None: all.
        device: where this rank computes.
        meets: whether neighbours connect; not where a pipeline of the same ranks has run.
    """
    preload()
    stages = [_stage(number, stack, boundaries, device, group, meter) for number, stack in stacks.items()]
    for stage in stages:
        stage.meets = meets
    settings = {"n_microbatches": schedule.microbatches, "loss_fn": loss}
    built: Any
    torch_class = SCHEDULES[name].torch_class
    if torch_class is not None:
        from torch.distributed import pipelining

        built = getattr(pipelining, torch_class)(stages[0], **settings)
    else:
        from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

        built = _PipelineScheduleRuntime(stages, **settings)
        actions = enumerate(schedule.actions)
        built._prepare_schedule_with_comms(
            {rank: [_Action.from_str(str(action)) for action in row] for rank, row in actions}
        )
    for stage in stages:
        stage.has_backward = True
    # Buffers are made and neighbours met now, as part of a reshape's pause and not of the first step.
    initialize = getattr(built, "_initialize_stages", None) or built._initialize_stage
    initialize((), {})
    return TorchPipeline(built, stages)


def backward_in_halves(
    stack: LayerStack,
    sources: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """The backward of a stage as torch's split schedules compute it, to try whether it can be split."""
    if not stack.input_learns or _has_frozen(stack):
        torch.autograd.backward(results, gradients)
        return
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    _, groups = stage_backward_input(
        list(results), [g for g in gradients if g is not None], list(sources), stack.parameters()
    )
    stage_backward_weight(stack.parameters(), groups)


def _has_frozen(stack: LayerStack) -> bool:
    # Torch's split backward starts from the stage's input: above frozen layers that has no gradient.
    return any(not parameter.requires_grad for parameter in stack.parameters())


def _stage(
    number: int,
    stack: LayerStack,
    boundaries: Sequence[Boundary],
    device: torch.device,
    group: Any,
    meter: Meter,
) -> Any:
    last = len(boundaries)
    # Only the tensors exchanged with other stages matter.
    outside = torch.empty(1, device="meta")
    made = _stage_class(
        stack,
        number,
        last + 1,
        device,
        input_args=boundaries[number - 1].example(_META) if number > 0 else outside,
        output_args=boundaries[number].example(_META) if number < last else outside,
        group=group,
    )
    made.meter, made.last_layer = meter, stack.indices[-1]
    made.weight_shares = _weight_shares(stack)
    made.stack = stack
    return made


def _weight_shares(stack: LayerStack) -> dict[int, float]:
    sizes = {
        layer.index: sum(p.numel() for p in layer.module.parameters() if p.requires_grad)
        for layer in stack.held
    }
    total = sum(sizes.values())
    return {index: size / total for index, size in sizes.items()} if total else {}
