"""A trial of a partition before it is in force: every stage runs one microbatch, forward and backward.

It finds the shapes of the tensors between stages, and whether the stages can run; no
parameter, gradient or buffer is changed.  A stage that fails is named on all ranks, and
all of them stop at the same place.  Where the shapes are known from earlier trials, the ranks try
their new stages side by side.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ballast_trainer.causes import describe
from ballast_trainer.data.collate import Batch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import is_peer_failure
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.buffers import copies_of, in_place
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.pipeline.partition_cache import Findings
from ballast_trainer.seeding import host_seeded
from ballast_trainer.trees import Tree, tensors_of

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

Gather = Callable[[Any], list[Any]]

_Run = tuple[LayerStack, Tree, Tree, bool]
"""A forward: stage, input, output, and whether its backward may be split."""

BackwardTrial = Callable[
    [LayerStack, Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None
]
"""Computes a stage's gradients as its schedule will: ``(stack, sources, results, gradients or None)``."""


class TrialFailed(TrainerError):  # noqa: N818
    """A stage cannot run as it was cut."""

    shows_cause = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The stages of a partition on this rank, and how to reach the others.

    Attributes:
        stacks: by stage, those that this rank holds.
        holders: by stage, the pipeline positions that hold it.
        line: this pipeline's ranks.
        loss: of one microbatch.
        backward: of a stage that is not the first; None: all at once.
        device: where this rank computes.
        ends_at_once: whether ranks wait for each other inside a stage, so that one that fails alone must end.
    """

    stacks: Mapping[int, LayerStack]
    holders: tuple[tuple[int, ...], ...]
    line: Axis
    loss: Loss
    backward: BackwardTrial | None
    device: torch.device
    ends_at_once: bool = False

    def run(self, batch: Batch, gather: Gather) -> tuple[tuple[Boundary, ...], list[Findings]]:
        """Try all stages, one after the other; collective over all ranks.

        Args:
            batch: inputs and targets of one microbatch.
            gather: a value of every rank, by rank, over all replicas of the pipeline.

        Returns:
            The boundaries between the stages, and what each rank has seen.

        Raises:
            TrialFailed: on every rank, with the first cause, unless the one that fails ends at once.  At the
                rank that failed its error is the cause.
        """
        boundaries: list[Boundary] = []
        error: Exception | None = None
        with self._observed() as seen:
            runs: list[_Run] = []
            problem: str | None = None
            for stage in range(len(self.holders)):
                found: Boundary | str | None = None
                if stage in self.stacks:
                    try:
                        found = self._forward(stage, batch, boundaries, runs)
                    except Exception as failure:
                        error, found = failure, self._told(failure)
                        problem = problem or found
                if stage + 1 < len(self.holders):
                    agreed = self._share(stage, found)
                    if isinstance(agreed, str):
                        problem = problem or agreed
                        break
                    boundaries.append(agreed)
            try:
                while runs and problem is None:
                    self._backward(*runs.pop())
            except Exception as failure:
                error, problem = failure, self._told(failure)
        return tuple(boundaries), self._agree(seen(), gather, problem, error)

    def run_some(
        self, stages: Collection[int], boundaries: Sequence[Boundary], batch: Batch, gather: Gather
    ) -> list[Findings]:
        """Try some stages of this rank between boundaries that are known; collective over all ranks.

        Args:
            stages: those to try; may be none.
            boundaries: between all stages.
            batch: inputs and targets of one microbatch.
            gather: a value of every rank, by rank, over all replicas of the pipeline.

        Returns:
            What each rank has seen.

        Raises:
            TrialFailed: as of :meth:`run`; also where a stage sends something else than is known.
        """
        error: Exception | None = None
        problem: str | None = None
        with self._observed() as seen:
            try:
                for stage in sorted(stages):
                    runs: list[_Run] = []
                    sends = self._forward(stage, batch, boundaries[:stage], runs)
                    if stage < len(boundaries) and sends != boundaries[stage]:
                        raise TypeError(
                            f"stage {stage} sends {sends}, and was known to send {boundaries[stage]}"
                        )
                    self._backward(*runs.pop())
            except Exception as failure:
                error, problem = failure, describe(failure)
        return self._agree(seen(), gather, problem, error)

    def _told(self, failure: Exception) -> str:
        if self.ends_at_once and is_peer_failure(failure):
            raise failure
        if self.ends_at_once:
            raise TrialFailed(describe(failure)) from failure
        return describe(failure)

    @contextlib.contextmanager
    def _observed(self) -> Iterator[Callable[[], Findings]]:
        """Forwards and backwards inside change nothing; yields what they have shown of the layers."""
        outputs: dict[int, Boundary] = {}

        def note(layer: int, module: nn.Module, given: Any, output: Any) -> None:
            with contextlib.suppress(TypeError):
                outputs[layer] = Boundary.of(output)

        layers = {
            i: m for stack in self.stacks.values() for i, m in zip(stack.indices, stack.stack, strict=True)
        }
        stateful: dict[int, tuple[str, ...]] = {}
        with contextlib.ExitStack() as undoing:
            for index, layer in layers.items():
                handle = layer.register_forward_hook(functools.partial(note, index))
                undoing.callback(handle.remove)
            undoing.enter_context(self._undone())
            copies = copies_of(module for stack in self.stacks.values() for module in stack.modules())
            changed = undoing.enter_context(in_place(copies))
            undoing.enter_context(host_seeded())
            yield lambda: Findings(outputs, stateful)
            modules = {id(module) for module in changed()}
            for index, layer in layers.items():
                names = tuple(name for name, module in layer.named_modules() if id(module) in modules)
                if names:
                    stateful[index] = names

    def _forward(
        self,
        stage: int,
        batch: Batch,
        boundaries: Sequence[Boundary],
        runs: list["_Run"],
    ) -> Boundary:
        source: Tree = batch[0]
        if stage > 0:
            source = boundaries[-1].example(self.device)
        stack, last = self.stacks[stage], stage + 1 == len(self.holders)
        with torch.enable_grad():
            result = stack(source)
            if last:
                result = self.loss(result, batch[1])
        if last and not isinstance(result, torch.Tensor):
            raise TypeError(f"the loss is {type(result).__name__}, not a tensor")
        runs.append((stack, source, result, stage > 0))
        return Boundary.of(result)

    def _backward(self, stack: LayerStack, source: Tree, result: Tree, halves: bool) -> None:
        results = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
        if not results:
            return
        gradients = [torch.zeros_like(tensor) for tensor in results]
        if halves and self.backward is not None:
            self.backward(stack, tensors_of(source), results, gradients)
        else:
            torch.autograd.backward(results, gradients)

    def _share(self, stage: int, found: Boundary | str | None) -> Boundary | str:
        """The result of the first holder of a stage, on all ranks of the pipeline."""
        box: list[Any] = [found]
        if self.line.size > 1:
            source = self.line.ranks[self.holders[stage][0]]
            dist.broadcast_object_list(box, src=source, group=self.line.group, device=self.device)
        agreed: Boundary | str = box[0]
        return agreed

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Restores the gradients at the end."""
        parameters = [p for stack in self.stacks.values() for p in stack.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _agree(
        self, mine: Findings, gather: Gather, problem: str | None, error: Exception | None
    ) -> list[Findings]:
        """Agree on whether it works; what each rank has seen."""
        everywhere = gather((problem, mine))
        for rank, (reason, _) in enumerate(everywhere):
            if reason is not None:
                raise TrialFailed(f"rank {rank}: {reason}" if len(everywhere) > 1 else reason) from error
        return [found for _, found in everywhere]
