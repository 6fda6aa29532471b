"""The pipeline of one rank, built from stages and a schedule, and the trial of it before it is in force."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from ballast_policies.contract.messages import Stage
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE
from ballast_policies.planning.schedules.schedule import Kind, Schedule

from ballast_trainer.data.collate import Batch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.buffers import tell_of_hooks, tell_of_replicas
from ballast_trainer.layers.frozen_outputs import FrozenOutputs
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.layers.precision import Loss
from ballast_trainer.pipeline.executor.executor import Executor
from ballast_trainer.pipeline.executor.links import Link, Transport, link_groups, replica_axis
from ballast_trainer.pipeline.executor.order import RankOrder
from ballast_trainer.pipeline.executor.pipelines import AsynchronousPipeline, ExecutedPipeline
from ballast_trainer.pipeline.executor.split_backward import backward_in_halves
from ballast_trainer.pipeline.layout import ScheduleRequest, holders_of
from ballast_trainer.pipeline.trial import PartitionCache, Trial, checked_loss
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.tensor_parallel.exchange import gather, scatter
from ballast_trainer.trees import chunks

Boundaries = tuple[Boundary, ...]


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
        return checked_loss(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineBuilder:
    """Builds the pipeline of one rank; every rank must build its own at the same step.

    Attributes:
        stages: the partition; their ranks count pipeline positions.
        schedule: the schedule, over all positions of the pipeline.
        rank: position of this rank.
        layers: the layers that this rank holds.
        meter: is told when a microbatch's work begins and ends.
        loss: of one microbatch.
        line: the ranks of this pipeline; None: all.
        lines: the ranks of every pipeline; none: there is one.
        tensor: ranks that send a part of the activations each; None: this rank sends all.
        independent_layers: no layer reads what others leave in this process.
        shared: the axes over which ranks wait for each other inside a stage: for weights, or parts of an
            output.
        frozen_outputs: keeps what frozen layers put out; None: nothing is kept.
        pipelines: replicas of the whole pipeline, which make an update together.
        layer_ended: whether each backward counts or a step's last one alone, and what is told that it has
            gone past a layer, where the schedule lets that be seen: not where backwards are split or stages
            have replicas.
    """

    stages: Sequence[Stage]
    schedule: ScheduleRequest
    rank: int
    layers: LayerSet
    meter: Meter
    loss: Loss
    line: Axis | None = None
    lines: tuple[tuple[int, ...], ...] = ()
    tensor: Axis | None = None
    independent_layers: bool = False
    shared: tuple[Axis, ...] = ()
    frozen_outputs: FrozenOutputs | None = None
    pipelines: int = 1
    layer_ended: tuple[bool, Callable[[int], None]] | None = None

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Pipeline positions that hold each stage."""
        return holders_of(self.stages, self.schedule.replicas)

    @property
    def _replicated(self) -> bool:
        return any(len(ranks) > 1 for ranks in self.holders)

    @property
    def _copies(self) -> str | None:
        """Kind of the copies of a layer's weights, where there are several."""
        if self.schedule.asynchronous and self.schedule.ranks > 1:
            return "versions"
        # Tensor ranks have the same microbatches.
        parts = 1 if self.tensor is None else self.tensor.size
        return "replicas" if self._replicated or len(self.lines) > parts else None

    @property
    def _sends_parts(self) -> bool:
        """True if the ranks of a tensor group send a part of a layer's output each."""
        return self.tensor is not None and self.tensor.size > 1

    @functools.cached_property
    def _one_step(self) -> Schedule:
        return self.schedule.one_step()

    @property
    def _splits_backward(self) -> bool:
        if self.schedule.ranks == 1:
            return False
        rows = self._one_step.actions
        return any(action.kind is Kind.BACKWARD_INPUT for row in rows for action in row)

    def stacks(self) -> dict[int, LayerStack]:
        """Layers of each stage that this rank holds."""
        last = len(self.stages) - 1
        held = {
            number: self._stack(number, range(stage.first_layer, stage.end_layer))
            for number, stage in enumerate(self.stages)
            if self.rank in self.holders[number]
        }
        for number, stack in held.items():
            stack.sends = number < last
            if self._sends_parts:
                assert self.tensor is not None
                stack.entrance = functools.partial(gather, axis=self.tensor) if number > 0 else None
                stack.exit = functools.partial(scatter, axis=self.tensor) if number < last else None
        return held

    def probe_partition(
        self,
        batch: Batch | Callable[[], Batch],
        everywhere: Callable[[Any], list[Any]] | None = None,
        *,
        known: PartitionCache | None = None,
        in_force: Sequence[Stage] | None = None,
        joined: Collection[int] = (),
    ) -> Boundaries:
        """Run one microbatch through every stage of the partition; collective.

        Args:
            batch: inputs and targets of a step, or what returns them.
            everywhere: gathers a value of every rank over all axes of the mesh; None: there is one pipeline.
            known: by earlier trials; receives what this one finds.
            in_force: the partition that these ranks run: of what is known, only new stages are tried, on
                a CPU none where every cut has run before or the layers are independent.  None: all are tried.
            joined: ranks that were not part of it, which try their stages in any case.

        Raises:
            ConfigurationError: on every rank; the model does not suit the configuration.
            TrialFailed: on every rank; a stage cannot run so.
        """
        line = self.line or Axis(ranks=tuple(range(self.schedule.ranks)), index=self.rank)
        gathered = everywhere or line.gather_objects
        known = PartitionCache() if known is None else known
        boundaries = None if in_force is None or self._sends_parts else known.boundaries(self.stages)
        runs = self.independent_layers or known.all_ran(self.stages)
        sure = runs and self.layers.device.type == "cpu"
        if boundaries is not None and sure and not joined:
            known.mark(self.layers)
            return boundaries
        trial = Trial(
            stacks=self.stacks(),
            holders=self.holders,
            line=line,
            loss=self.loss,
            backward=backward_in_halves if self._splits_backward else None,
            device=self.layers.device,
            shared=self.shared,
            copies=self._copies is not None,
        )
        inputs, targets = batch() if callable(batch) else batch
        count = self.schedule.microbatches
        first = chunks(inputs, count)[0], targets.chunk(count)[0]
        if boundaries is None:
            boundaries, found = trial.run(first, gathered)
        else:
            ran = set(in_force or ())
            new = any(self.stages[number] not in ran for number in trial.stacks)
            tries = new and not (sure and self.rank not in joined)
            # What another stage leaves in this process counts, too.
            found = trial.run_some(list(trial.stacks) if tries else [], boundaries, first, gathered)
        known.add(self.stages, found)
        known.refuse_written(self.layers.shared_buffers)
        known.mark(self.layers)
        if self._copies == "replicas":
            tell_of_replicas(module for layer in self.layers for module in layer.stateful)
            tell_of_hooks(layer.module for layer in self.layers)
        return boundaries

    def build(self, boundaries: Boundaries) -> ExecutedPipeline:
        """The pipeline by its trial's findings; collective. Raises ConfigurationError: counts do not suit."""
        schedule, stacks = self.schedule, self.stacks()
        for number, stack in stacks.items():
            if number < len(boundaries):
                # Messages of another shape would end the process.
                stack.sent_as = boundaries[number]
        if schedule.asynchronous or schedule.ranks == 1:
            # One rank goes through its microbatches one by one; a run without a flush may be one step.
            flush = dataclasses.replace(schedule, name=DEFAULT_SCHEDULE, stages_per_rank=None).one_step()
        else:
            flush = self._one_step
        line = range(flush.ranks) if self.line is None else self.line.ranks
        replicas, groups = Axis(), dict[Link, Any]()
        if flush.ranks > 1:
            replicas = replica_axis(flush.stage_ranks, self.rank)
            groups |= link_groups(flush.stage_ranks, flush.microbatches, self.lines or [line], line)
        executor = Executor(
            stacks,
            boundaries,
            meter=self.meter,
            loss=_MeteredLoss(self.loss, self.meter, self.stages[-1].end_layer - 1),
            device=self.layers.device,
            transport=Transport(groups, line),
            pipelines=self.pipelines,
        )
        order = RankOrder(flush, self.rank, 1)
        if schedule.asynchronous:
            return AsynchronousPipeline(executor, order, replicas, schedule.run_of)
        return ExecutedPipeline(executor, order, replicas)

    def _last_backward(self, stage: int) -> int:
        """The microbatch whose backward is the last of a step; some schedules go backwards through them."""
        if self.schedule.ranks == 1:
            return self.schedule.microbatches - 1
        row = self._one_step.actions[self.rank]
        return [one.microbatch for one in row if one.stage == stage and one.kind is Kind.BACKWARD][-1]

    def _stack(self, number: int, indices: Iterable[int]) -> LayerStack:
        held = [self.layers[index] for index in indices]
        stack = LayerStack(held, self.meter, self.layers.seed, self.layers.device)
        stack.frozen_outputs = self.frozen_outputs
        hides = self._splits_backward or self.schedule.asynchronous or self._replicated
        if self.layer_ended is not None and not hides:
            each, told = self.layer_ended
            stack.layer_ended = None if each else self._last_backward(number), told
        stack.train()
        return stack
