"""Executor of one rank's actions of a schedule: forwards, backwards, messages, updates, in order.

Autograd computes; the order, the versions of the weights and the messages come from the schedule.
Microbatches in flight and weight versions held are counted while it runs.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from ballast_policies.planning.schedules.schedule import Action, Kind, ScheduleError, WeightRule
from torch import nn

from ballast_trainer.data.collate import Batch
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.layers.precision import Loss
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.pipeline.executor.links import Links, Transport
from ballast_trainer.pipeline.executor.order import (
    BACKWARDS,
    LAST_OF_MICROBATCH,
    PlannedAction,
    RankOrder,
)
from ballast_trainer.pipeline.executor.split_backward import SplitBackward
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.trees import Tree, chunks, mapped, tensors_of, unflatten


class WeightVersions:
    """The weights of one stage in one run of a schedule: one copy of each version held.

    A microbatch computes with the parameters of its version, put in the place of the module's, so that its
    backward finds the weights of its forward however often the stage was updated in between.  The newest
    version shares its memory with the parameters; before an update these move to a copy if the version is
    still needed.

    Attributes:
        newest: the newest version; version v is the weights after v updates of the run.
        most_held: the most versions that were held at once.
    """

    def __init__(self, modules: Iterable[nn.Module], uses: Iterable[int]) -> None:
        """Begin with version 0, the present weights; ``uses``: the versions of its microbatches."""
        self._places = [
            (owner, name, parameter)
            for module in modules
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        self._uses = Counter(uses)
        self.newest = 0
        self._held = {0: self._alias()}
        self.most_held = 1

    def _alias(self) -> list[nn.Parameter]:
        return [_alias_of(live) if live.requires_grad else live for _, _, live in self._places]

    @contextlib.contextmanager
    def in_place(self, version: int) -> Iterator[None]:
        """Let the modules compute with ``version``."""
        for (owner, name, _), parameter in zip(self._places, self._held[version], strict=True):
            _put(owner, name, parameter)
        try:
            yield
        finally:
            for owner, name, live in self._places:
                _put(owner, name, live)

    def done(self, version: int) -> None:
        """Count a microbatch of ``version`` as done."""
        self._gather(version)
        self._uses[version] -= 1
        self._let_go()

    def forget(self, uses: Iterable[int]) -> None:
        """Microbatches of these versions will not be computed after all."""
        self._uses.subtract(uses)
        self._let_go()

    def update(self, apply_gradients: Callable[[], None]) -> None:
        """Make the next version: ``apply_gradients`` updates the parameters from their gradients."""
        if self._uses[self.newest] > 0:
            for _, _, live in self._places:
                if live.requires_grad:
                    live.data = live.data.clone()
        else:
            del self._held[self.newest]
        apply_gradients()
        self.newest += 1
        self._held[self.newest] = self._alias()
        self.most_held = max(self.most_held, len(self._held))

    def _gather(self, version: int) -> None:
        """Add a version's gradients to those of the parameters."""
        for (_, _, live), parameter in zip(self._places, self._held[version], strict=True):
            if parameter.grad is not None and parameter is not live:
                live.grad = parameter.grad if live.grad is None else live.grad.add_(parameter.grad)
                parameter.grad = None
                for hook in (live._post_accumulate_grad_hooks or {}).values():
                    hook(live)

    def _let_go(self) -> None:
        gone = [v for v in self._held if v != self.newest and self._uses[v] <= 0]
        for version in gone:
            del self._held[version]


def _alias_of(live: nn.Parameter) -> nn.Parameter:
    """A parameter in the memory of another, with its attributes and the hooks of its gradient."""
    alias = nn.Parameter(live.data)
    vars(alias).update(vars(live))
    for hook in (live._backward_hooks or {}).values():
        alias.register_hook(hook)
    return alias


def _put(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(owner).__setattr__ is nn.Module.__setattr__:
        owner._parameters[name] = parameter
    else:
        # Recurrent modules keep a second list of their weights, which their own setter follows.
        setattr(owner, name, parameter)


class ApplyGradients(Protocol):
    """Changes a stage's parameters by the gradients gathered in them, and clears these."""

    def __call__(self, stage: int, *, step: int, replicas: int) -> None:
        """Update the weights from this rank's gradients; ``replicas`` of the stage have theirs."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeakUsage:
    """Most microbatches between forward and backward, and versions of weights, at once, by stage here."""

    in_flight: Mapping[int, int]
    versions: Mapping[int, int]


@dataclasses.dataclass(slots=True)
class _Kept:
    """Tensors kept from a microbatch's forward to its backward."""

    sources: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]


class Executor:
    """One rank's stages, and the run that goes through them.

    Attributes:
        stacks: by stage, the layers that this rank holds.
        meter: is told when a microbatch's work begins and ends.
    """

    def __init__(
        self,
        stacks: Mapping[int, LayerStack],
        boundaries: Sequence[Boundary],
        *,
        meter: Meter,
        loss: Loss,
        device: torch.device,
        transport: Transport,
        pipelines: int = 1,
    ) -> None:
        """Prepare; ``boundaries``: of all stages; ``loss``: of one microbatch, for the last stage.

        ``pipelines``: replicas of the whole pipeline, which make an update together.
        """
        self.stacks, self._boundaries = stacks, tuple(boundaries)
        self.meter, self._loss, self._device, self._transport = meter, loss, device, transport
        self._pipelines = pipelines

    def begin(
        self,
        order: RankOrder,
        first_step: int,
        batch: Callable[[int], Batch],
        apply_gradients: ApplyGradients | None = None,
    ) -> None:
        """Start a run of ``order.steps`` steps, the first of which is ``first_step``.

        ``batch`` gives a step's, ``apply_gradients`` is for schedules with update actions.
        """
        self._order, self._first_step = order, first_step
        self._batch, self._apply_gradients = batch, apply_gradients
        CURRENT_FORWARD.loss_share = 1 / (order.schedule.update_every * self._pipelines)
        self._links = Links(order, self._boundaries, self._transport, self._device)
        self._place = self._step = 0
        self._last_step = order.steps - 1
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._halves: dict[tuple[int, int], SplitBackward] = {}
        self._local: dict[Action, Sequence[torch.Tensor]] = {}
        self._chunks: dict[int, tuple[Sequence[Tree], Sequence[torch.Tensor]]] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._in_flight = dict.fromkeys(self.stacks, 0)
        self._most_in_flight = dict.fromkeys(self.stacks, 0)
        self._versions: dict[int, WeightVersions] = {}
        if order.schedule.weights is not WeightRule.FLUSH:
            for stage, stack in self.stacks.items():
                self._versions[stage] = WeightVersions(stack.stack, self._uses(stage, 0))

    def _uses(self, stage: int, first_microbatch: int) -> list[int]:
        return [
            self._order.versions[stage, a.microbatch]
            for a in self._order.actions
            if a.stage == stage and a.kind is Kind.FORWARD and a.microbatch >= first_microbatch
        ]

    def _admit(self) -> None:
        """Allow receives of steps sure to run: a run ends ``lead`` steps later at the earliest."""
        sure = min(self._step + self._order.lead, self._last_step)
        self._links.admit((sure + 1) * self._order.microbatches)

    def end_after(self, step: int) -> None:
        """Admit no microbatch of the steps after ``step`` (counted from the run's first).

        Must be called on all ranks at the end of the same step, at least ``lead`` before ``step``.
        """
        if step >= self._last_step:
            return
        self._last_step = step
        self._links.end_before((step + 1) * self._order.microbatches)
        for stage, versions in self._versions.items():
            versions.forget(self._uses(stage, (step + 1) * self._order.microbatches))

    @property
    def ended(self) -> bool:
        """True if this rank has done all steps of the run."""
        return self._step > self._last_step

    def advance(self) -> float | None:
        """Advance to the end of this rank's next step, and partly into the steps after it.

        Returns:
            That step's mean loss on the rank of the last stage (its replica's part of it); else None.
        """
        self._admit()
        end = self._order.ends[self._step]
        while self._place < end:
            planned = self._order.planned[self._place]
            if planned.step <= self._last_step:
                self._do(planned)
            self._place += 1
        self._chunks.pop(self._step, None)
        losses = self._losses.pop(self._step, None)
        self._step += 1
        if losses is None:
            return None
        return float(torch.stack(losses).sum().div(self._order.microbatches))

    def finish(self) -> PeakUsage:
        """End the run: wait for all messages, and check that the pipeline is empty."""
        self._links.finish()
        if self._kept:
            raise ScheduleError(f"the run ended with {sorted(self._kept)} (stage, microbatch) in flight")
        versions = {stage: held.most_held for stage, held in self._versions.items()}
        return PeakUsage(
            in_flight=self._most_in_flight,
            versions={stage: versions.get(stage, 1) for stage in self.stacks},
        )

    def _do(self, planned: PlannedAction) -> None:
        action, stage = planned.action, planned.action.stage
        self.meter.step = self._first_step + planned.step
        if action.kind is Kind.FORWARD:
            self._forward(planned)
        elif action.kind in BACKWARDS:
            self._backward(planned)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            self._backward_weights(action)
        elif action.kind is Kind.UPDATE:
            replicas = len(self._order.schedule.stage_ranks[stage])
            apply_gradients, step = self._apply_gradients, self.meter.step
            assert apply_gradients is not None, f"a schedule with a flush has no update of stage {stage}"
            self._versions[stage].update(lambda: apply_gradients(stage, step=step, replicas=replicas))
        if action.kind in LAST_OF_MICROBATCH:
            self._in_flight[stage] -= 1

    def _forward(self, planned: PlannedAction) -> None:
        action, step = planned.action, planned.step
        stage, k = action.stage, action.microbatch
        stack, meter = self.stacks[stage], self.meter
        inputs, targets = self._step_chunks(stage, step)
        within = k % self._order.microbatches
        if stage == 0:
            # A batch may want a gradient; its microbatches are then computed apart.
            value = mapped(lambda one: one.detach().requires_grad_(one.requires_grad), inputs[within])
            sources: Sequence[torch.Tensor] = tensors_of(value)
        else:
            sources = self._activation(planned)
            value = unflatten(self._boundaries[stage - 1].structure, iter(sources))
        with self._weights(action):
            meter.begin(within, meter.forward, None)
            value = stack(value)
            meter.end()
            if stage + 1 == self._order.schedule.stages:
                value = self._loss(value, targets[within])
                self._losses.setdefault(step, []).append(value.detach())
        results = tensors_of(value)
        self._kept[stage, k] = _Kept(sources, results)
        self._in_flight[stage] += 1
        self._most_in_flight[stage] = max(self._most_in_flight[stage], self._in_flight[stage])
        self._hand_on(planned, results)

    def _backward(self, planned: PlannedAction) -> None:
        action = planned.action
        stage, k = action.stage, action.microbatch
        kept, meter = self._kept.pop((stage, k)), self.meter
        last = stage + 1 == self._order.schedule.stages
        waited = kept.results if last else [t for t, sent in self._sent(stage, kept.results) if sent]
        gradients: Sequence[torch.Tensor]
        if last:
            # From the start, as in one process: hooks and backwards of the user's see these gradients.
            gradients = [torch.full_like(value, CURRENT_FORWARD.loss_share) for value in kept.results]
        else:
            gradients = self._gradient(planned)
        # What a microbatch has computed may need no gradient although others did.
        pairs = [(t, g) for t, g in zip(waited, gradients, strict=True) if t.requires_grad]
        results, gradients = [t for t, _ in pairs], [g for _, g in pairs]
        with self._weights(action):
            meter.begin(k % self._order.microbatches, meter.backward, self.stacks[stage].indices[-1])
            if results and action.kind is Kind.BACKWARD_INPUT:
                halves = SplitBackward(results, kept.sources, self.stacks[stage].parameters())
                halves.for_input(gradients)
                self._halves[stage, k] = halves
            elif results:
                torch.autograd.backward(results, gradients)
            meter.end()
        self.stacks[stage].backward_ended(k % self._order.microbatches)
        if stage in self._versions and action.kind is Kind.BACKWARD:
            self._versions[stage].done(self._order.versions[stage, k])
        learning = [source for source in kept.sources if source.requires_grad]
        if stage > 0 and learning:
            found = [torch.zeros_like(s) if s.grad is None else s.grad for s in learning]
            self._hand_on(planned, found)

    def _backward_weights(self, action: Action) -> None:
        stage, k = action.stage, action.microbatch
        halves, meter, stack = self._halves.pop((stage, k), None), self.meter, self.stacks[stage]
        with self._weights(action):
            meter.begin(k % self._order.microbatches, meter.backward, stack.indices[-1])
            if halves is not None and meter.by_layer:
                layer_of = self._layer_of(stage)
                halves.for_weights(before=lambda parameter: meter.enter(layer_of[id(parameter)]))
            elif halves is not None:
                halves.for_weights()
            meter.end()
        if stage in self._versions:
            self._versions[stage].done(self._order.versions[stage, k])

    def _layer_of(self, stage: int) -> dict[int, int]:
        """Layer of each parameter, by the parameter's identity."""
        stack = self.stacks[stage]
        return {
            id(parameter): index
            for index, module in zip(stack.indices, stack.stack, strict=True)
            for parameter in module.parameters()
        }

    def _weights(self, action: Action) -> contextlib.AbstractContextManager[None]:
        if action.stage not in self._versions:
            return contextlib.nullcontext()
        version = self._order.versions[action.stage, action.microbatch]
        return self._versions[action.stage].in_place(version)

    def _step_chunks(self, stage: int, step: int) -> tuple[Sequence[Tree], Sequence[torch.Tensor]]:
        """A step's inputs and targets by microbatch; nothing in stages that need neither."""
        if 0 < stage < self._order.schedule.stages - 1:
            return (), ()
        if step not in self._chunks:
            inputs, targets = self._batch(self._first_step + step)
            count = self._order.microbatches
            self._chunks[step] = (chunks(inputs, count), targets.chunk(count))
        return self._chunks[step]

    def _sent(self, stage: int, results: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, bool]]:
        """A stage's outputs, each with whether its gradient comes back."""
        sent = self._boundaries[stage].tensors
        return ((result, one.requires_grad) for result, one in zip(results, sent, strict=True))

    def _activation(self, planned: PlannedAction) -> Sequence[torch.Tensor]:
        """The output of the stage before."""
        if planned.received is None:
            return self._local.pop(planned.action)
        received = self._links.receive(planned.received)
        return [
            tensor.requires_grad_(sent) for tensor, sent in self._sent(planned.action.stage - 1, received)
        ]

    def _gradient(self, planned: PlannedAction) -> Sequence[torch.Tensor]:
        """The gradients from the stage after; none where no layer below it is trained."""
        if planned.received is None:
            return self._local.pop(planned.action, ())
        return self._links.receive(planned.received)

    def _hand_on(self, planned: PlannedAction, tensors: Sequence[torch.Tensor]) -> None:
        """Hand tensors to another rank, or to a stage of this one."""
        if planned.consumer is None:
            return
        if planned.sent is not None:
            self._links.send(planned.sent, tensors)
        elif planned.action.kind is Kind.FORWARD:
            pairs = self._sent(planned.action.stage, tensors)
            self._local[planned.consumer] = [tensor.detach().requires_grad_(sent) for tensor, sent in pairs]
        else:
            self._local[planned.consumer] = [tensor.detach() for tensor in tensors]
