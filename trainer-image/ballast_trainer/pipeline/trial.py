"""A trial of a partition before it is in force: every stage runs one microbatch, forward and backward.

It finds the shapes of the tensors between stages, and whether the stages can run; no
parameter, gradient or buffer is changed.  A stage that fails is named on all ranks, and
all of them stop at the same place, also those that wait for it inside the stage.  Where the shapes are
known from earlier trials, the ranks try their new stages side by side.
"""

import contextlib
import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract.messages import Stage
from torch import nn

from ballast_trainer.causes import describe
from ballast_trainer.data.collate import Batch
from ballast_trainer.distributed.axis import Axis, wait_for
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.buffers import ATTRIBUTES_OF_MODULES, attributes_back, copies_of, in_place
from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.layers.precision import Loss
from ballast_trainer.models.ties import Tie, as_text
from ballast_trainer.seeding import host_seeded
from ballast_trainer.trees import Tree, tensors_of

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of a batch's inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """Findings of a rank on layers it tried: tensor outputs, and names of buffers that forwards write."""

    outputs: Mapping[int, Boundary]
    written: Mapping[int, tuple[str, ...]]


class PartitionCache:
    """The cuts that have run, and what each layer would send: what the next move need not try again.

    All ranks of the world take part in the same trials and record the same, so they decide alike from it.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, Boundary] = {}
        self._written: dict[int, set[str]] = {}
        self._cuts: set[int] = set()
        self.shape: Shapes | None = None
        """Shape of the inputs that the trials have run; None: there is but one."""

    def of_inputs(self, shape: Shapes | None) -> None:
        """Trials from now on run inputs of this shape: what those of another have shown does not count."""
        if shape != self.shape:
            self.forget()
            self.shape = shape

    def forget(self) -> None:
        """The layers have changed."""
        self._outputs.clear()
        self._written.clear()
        self._cuts.clear()

    def add(self, stages: Sequence[Stage], found: Iterable[Findings]) -> None:
        """A partition was tried and works; ``found`` of all ranks."""
        if len({stage.rank for stage in stages}) == len(stages):
            # Several stages of one rank share its process: a cut between them separates nothing.
            self._cuts.update(stage.first_layer for stage in stages)
        for one in found:
            self._outputs.update(one.outputs)
            for layer, names in one.written.items():
                # Replicas must agree, even where their microbatches differ.
                self._written.setdefault(layer, set()).update(names)

    def refuse_written(self, shared: Iterable[Tie]) -> None:
        """Refuse layers that write buffers which others share. Raises ConfigurationError: one does."""
        for tie in shared:
            if any(name in self._written.get(layer, ()) for layer, name in tie):
                raise ConfigurationError(
                    "model.name",
                    f"{as_text(tie)} are one buffer, which a forward changes, and each layer has its own on "
                    "its rank. To fix: let one layer have it and hand it on beside its output",
                )

    def boundaries(self, stages: Sequence[Stage]) -> tuple[Boundary, ...] | None:
        """Boundaries between the stages; None where a layer's output is not known."""
        ends = [stage.end_layer - 1 for stage in stages[:-1]]
        known = [self._outputs.get(end) for end in ends]
        return None if None in known else tuple(one for one in known if one is not None)

    def all_ran(self, stages: Sequence[Stage]) -> bool:
        """True if every cut was part of a partition that worked, one stage a rank.

        Then no layer needs one of another stage: each cut has separated all layers before it from all behind.
        """
        ranks = {stage.rank for stage in stages}
        return len(ranks) == len(stages) and self._cuts.issuperset(stage.first_layer for stage in stages)

    def mark(self, layers: Iterable[Layer]) -> None:
        """Tell layers which of their modules have state."""
        for layer in layers:
            names = {name.rpartition(".")[0] for name in self._written.get(layer.index, ())}
            layer.stateful = tuple(m for name, m in layer.module.named_modules() if name in names)


Gather = Callable[[Any], list[Any]]

Problem = str | ConfigurationError
"""Reason that a stage cannot run."""

_Run = tuple[LayerStack, Tree, Tree, bool]
"""A forward: stage, input, output, and whether its backward may be split."""

_Weight = tuple[nn.Parameter, int, bool, torch.Tensor]
"""A parameter before a forward: itself, its version, whether it learns, and its value."""

BackwardTrial = Callable[
    [LayerStack, Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None
]
"""Computes a stage's gradients as its schedule will: ``(stack, sources, results, gradients or None)``."""


class TrialFailed(TrainerError):  # noqa: N818
    """A stage cannot run as it was cut."""

    shows_cause = True


_ELSEWHERE = "a rank that shares its layers has failed"
"""Reason that a stage does not run that was fine on this rank."""


class _Shared:
    """The axes over which ranks wait for each other inside a stage: where one fails, the others do.

    Before each collective of a layer they tell each other that they have come there; whoever has failed
    tells that in its place, and so does each one that hears of it over another axis.  At the end of the stage
    they do so once more.
    """

    def __init__(self, axes: Sequence[Axis], device: torch.device) -> None:
        self._axes, self._device = axes, device
        self._open: list[Axis] = []

    def __enter__(self) -> None:
        self._open = list(self._axes)
        for axis in self._axes:
            axis.before_each = functools.partial(self._ask, axis)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for axis in self._axes:
            axis.before_each = None
        # Of several axes side by side: those of one may wait for the others.
        told = [self._tell(axis, failed=error is not None) for axis in self._open]
        failed = [_heard(*each) for each in told]
        if error is None and any(failed):
            raise TrialFailed(_ELSEWHERE)

    def _ask(self, axis: Axis) -> None:
        if axis in self._open and _heard(*self._tell(axis, failed=False)):
            self._open.remove(axis)
            raise TrialFailed(_ELSEWHERE)

    def _tell(self, axis: Axis, *, failed: bool) -> tuple[torch.Tensor, Any]:
        flag = torch.tensor(float(failed), device=self._device)
        return flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=axis.group, async_op=True)


def _heard(flag: torch.Tensor, work: Any) -> bool:
    wait_for([work])
    return bool(flag.item())


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
        shared: the axes over which ranks wait for each other inside a stage.
        copies: a layer's weights are in several places, as replicas or as versions.
    """

    stacks: Mapping[int, LayerStack]
    holders: tuple[tuple[int, ...], ...]
    line: Axis
    loss: Loss
    backward: BackwardTrial | None
    device: torch.device
    shared: tuple[Axis, ...] = ()
    copies: bool = False

    def run(self, batch: Batch, gather: Gather) -> tuple[tuple[Boundary, ...], list[Findings]]:
        """Try all stages, one after the other; collective over all ranks.

        ``batch`` is one microbatch; ``gather`` goes over all replicas of the pipeline. Returns the boundaries
        between the stages, and what each rank has seen.

        Raises:
            ConfigurationError: on every rank; that was the first cause.
            TrialFailed: on every rank, with the first cause.  At the rank that failed its error is the cause.
        """
        boundaries: list[Boundary] = []
        error: Exception | None = None
        # The last stage's layers and the loss may keep what they like, and this rank's others beside them.
        before = None if len(self.holders) - 1 in self.stacks else _computed()
        with self._observed() as seen:
            runs: list[_Run] = []
            problem: Problem | None = None
            for stage in range(len(self.holders)):
                found: Boundary | Problem | None = None
                if stage in self.stacks:
                    try:
                        with self._together():
                            found = self._forward(stage, batch, boundaries, runs)
                    except Exception as failure:
                        error, found = failure, _told(failure)
                        problem = problem or found
                # Not all that share a stage with one that has failed have heard of it.
                if self.shared and any(gather(problem)):
                    problem = problem or _ELSEWHERE
                    break
                if stage + 1 < len(self.holders):
                    agreed = self._share(stage, found)
                    if not isinstance(agreed, Boundary):
                        problem = problem or agreed
                        break
                    boundaries.append(agreed)
            try:
                if problem is None:
                    with self._together():
                        while runs:
                            self._backward(*runs.pop())
                    if before is not None:
                        self._refuse_kept(before)
            except Exception as failure:
                error, problem = failure, _told(failure)
        return tuple(boundaries), self._agree(seen(), gather, problem, error)

    def run_some(
        self, stages: Collection[int], boundaries: Sequence[Boundary], batch: Batch, gather: Gather
    ) -> list[Findings]:
        """Try some stages of this rank between boundaries that are known; collective over all ranks.

        There may be none; ``batch`` and ``gather`` as of :meth:`run`. Returns what each rank has seen.

        Raises:
            ConfigurationError: as of :meth:`run`.
            TrialFailed: as of :meth:`run`; also where a stage sends something else than is known.
        """
        error: Exception | None = None
        problem: Problem | None = None
        with self._observed() as seen:
            try:
                with self._together():
                    for stage in sorted(stages):
                        runs: list[_Run] = []
                        sends = self._forward(stage, batch, boundaries[:stage], runs)
                        if stage < len(boundaries) and sends != boundaries[stage]:
                            raise TypeError(
                                f"stage {stage} sends {sends}, and was known to send {boundaries[stage]}"
                            )
                        self._backward(*runs.pop())
            except Exception as failure:
                error, problem = failure, _told(failure)
        return self._agree(seen(), gather, problem, error)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return _Shared(self.shared, self.device)

    @contextlib.contextmanager
    def _observed(self) -> Iterator[Callable[[], Findings]]:
        """Forwards and backwards inside change nothing; yields what they have shown of the layers."""
        outputs: dict[int, Boundary] = {}

        def note(layer: Layer, module: nn.Module, given: Any, output: Any) -> None:
            with contextlib.suppress(TypeError):
                outputs[layer.index] = Boundary.of(output, examples=True)
            self._refuse_changed_weights(layer, weights.pop(layer.index))
            _refuse_other_references(layer, buffers[layer.index])

        def keep(layer: Layer, module: nn.Module, given: Any) -> None:
            # Of one layer at a time, since they take its memory once more.
            weights[layer.index] = {
                name: (one, one._version, one.requires_grad, one.detach().clone())
                for name, one in layer.module.named_parameters()
            }
            copies = dict(layer.module.named_buffers())
            buffers[layer.index] += [
                (name, copies[name], copies[name]._version) for name in aliased[layer.index]
            ]

        weights: dict[int, dict[str, _Weight]] = {}
        held = {layer.index: layer for stack in self.stacks.values() for layer in stack.held}
        layers = {index: layer.module for index, layer in held.items()}
        written: dict[int, tuple[str, ...]] = {}
        buffers = {
            index: [
                (name, one, one._version) for name, one in layer.named_buffers() if not one.is_inference()
            ]
            for index, layer in layers.items()
        }
        aliased = {index: _with_other_references(layer) for index, layer in layers.items()}
        with contextlib.ExitStack() as undoing:
            for index, layer in layers.items():
                for handle in (
                    layer.register_forward_pre_hook(functools.partial(keep, held[index])),
                    layer.register_forward_hook(functools.partial(note, held[index])),
                ):
                    undoing.callback(handle.remove)
            undoing.enter_context(self._undone())
            whole = [module for layer in layers.values() for module in layer.modules()]
            changed = undoing.enter_context(in_place(copies_of(whole)))
            attributes = undoing.enter_context(attributes_back(whole))
            undoing.enter_context(host_seeded())
            yield lambda: Findings(outputs, written)
            attributes.tell_changed()
            found = changed()
            for index, layer in layers.items():
                paths = {module: path for path, module in layer.named_modules()}
                names = tuple(
                    f"{paths[module]}.{name}".removeprefix(".") for module, name in found if module in paths
                )
                if names:
                    written[index] = names

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
                result = checked_loss(self.loss(result, batch[1]))
        runs.append((stack, source, result, stage > 0))
        return Boundary.of(result, examples=True)

    def _refuse_changed_weights(self, layer: Layer, before: Mapping[str, _Weight]) -> None:
        """Refuse a forward that has changed or made parameters; ``before``: them, by name.

        No backward needs the rows that an Embedding with ``max_norm`` has found and changed.

        Raises:
            ConfigurationError: it has.
        """
        for name, parameter in layer.module.named_parameters():
            known, version, learns, value = before.get(name, (None, 0, False, parameter))
            if known is not parameter:
                raise ConfigurationError(
                    "model.name",
                    f"layer {layer.index} makes its parameter {name} in a forward, and its optimizer has "
                    "none that was not there before. To fix: make it where the layer is built",
                )
            part = layer.module.get_submodule(name.rpartition(".")[0])
            alone = not self.copies and name not in layer.tied.values()
            bounded = getattr(part, "max_norm", None) is not None and alone
            # Through ``.data`` a value changes without its version.
            written = parameter._version != version or not _equal(parameter.detach(), value)
            if parameter.requires_grad != learns or (written and not bounded):
                what = f"its {name}" if written else f"requires_grad of its {name}"
                raise ConfigurationError(
                    "model.name",
                    f"layer {layer.index} changes {what} in a forward, and replicas, repeats "
                    "(training.recompute), tied layers and backwards that follow other forwards would have "
                    "another one. "
                    "To fix: change weights in the optimizer (an Embedding without max_norm), choose those "
                    "that learn where the layer is built, or let a buffer have what does not learn",
                )

    def _backward(self, stack: LayerStack, source: Tree, result: Tree, halves: bool) -> None:
        results = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
        gradients = [torch.zeros_like(tensor) for tensor in results]
        if halves and results and self.backward is not None:
            self.backward(stack, tensors_of(source), results, gradients)
        elif results:
            torch.autograd.backward(results, gradients)
        refuse_sparse_gradients(stack.held)
        stack.backward_ended(None)

    def _refuse_kept(self, before: Sequence[torch.Tensor]) -> None:
        """Refuse what layers keep beside their output, as for the loss of another rank to read.

        Raises:
            ConfigurationError: tensors are left that were not there before, and that a gradient could reach.
        """
        if len(_computed()) <= len(before):
            return
        gc.collect()
        known = {id(tensor) for tensor in before}
        # Weights that torch.nn.utils.weight_norm and its like compute before each forward.
        known |= {
            id(value)
            for stack in self.stacks.values()
            for module in stack.modules()
            for value in vars(module).values()
            if isinstance(value, torch.Tensor) and (value.numel() > 1 or module._forward_pre_hooks)
        }
        left = [tensor for tensor in _computed() if id(tensor) not in known]
        if left:
            layers = [index for stack in self.stacks.values() for index in stack.indices]
            shape = list(min(left, key=torch.Tensor.numel).shape)
            raise ConfigurationError(
                "model.name",
                f"one of layers {layers[0]} to {layers[-1]} keeps a tensor of shape {shape} that it has "
                "computed from its weights: a loss that reads it would not get it from another rank. To fix: "
                "hand it on beside the output, or with_side_loss (docs/trainer-models.md, Auxiliary losses); "
                "detach() it where it is only looked at",
            )

    def _share(self, stage: int, found: Boundary | Problem | None) -> Boundary | Problem:
        """The result of the first holder of a stage, on all ranks of the pipeline."""
        box: list[Any] = [found]
        if self.line.size > 1:
            source = self.line.ranks[self.holders[stage][0]]
            dist.broadcast_object_list(box, src=source, group=self.line.group, device=self.device)
        agreed: Boundary | Problem = box[0]
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
        self, mine: Findings, gather: Gather, problem: Problem | None, error: Exception | None
    ) -> list[Findings]:
        """Agree on whether it works; what each rank has seen."""
        everywhere = gather((problem, mine))
        # One that has failed because of another is not the cause.
        for rank, (reason, _) in sorted(enumerate(everywhere), key=lambda each: each[1][0] == _ELSEWHERE):
            if isinstance(reason, ConfigurationError):
                raise reason
            if reason is not None:
                raise TrialFailed(f"rank {rank}: {reason}" if len(everywhere) > 1 else reason) from error
        return [found for _, found in everywhere]


def _computed() -> list[torch.Tensor]:
    """All tensors of this process that Python refers to and a gradient may go through."""
    return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.grad_fn is not None]


def refuse_sparse_gradients(layers: Iterable[Layer]) -> None:
    """Refuse gradients that are not dense after a backward. Raises ConfigurationError: a layer has one."""
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ConfigurationError(
                    "model.name",
                    f"the gradient of {name} of layer {layer.index} is sparse, and norms and sums over ranks "
                    "are of dense ones. To fix: sparse=False where the layer looks up that weight",
                )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if they have the same bytes: what is no number does not equal itself."""
    return one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _with_other_references(layer: nn.Module) -> list[str]:
    """Names of buffers whose memory another buffer has, or a tensor among the modules' attributes."""
    found = [(one, name) for name, one in layer.named_buffers()]
    for part in layer.modules():
        for attribute, value in vars(part).items():
            if attribute not in ATTRIBUTES_OF_MODULES:
                many = value.values() if isinstance(value, dict) else value
                held = many if isinstance(value, (dict, list, tuple)) else [value]
                found += [(one, "") for one in held if isinstance(one, torch.Tensor)]
    plain = [(one.untyped_storage().data_ptr(), name) for one, name in found if one.layout is torch.strided]
    counts = Counter(address for address, _ in plain)
    return [name for address, name in plain if name and address and counts[address] > 1]


def _refuse_other_references(layer: Layer, buffers: Sequence[tuple[str, torch.Tensor, int]]) -> None:
    """Refuse a forward that writes a buffer to which it has another reference, or by that.

    ``buffers``: name, tensor, and its version before.

    Raises:
        ConfigurationError: it does.
    """
    for name, buffer, version in buffers:
        if buffer._version != version:
            raise ConfigurationError(
                "model.name",
                f"layer {layer.index} changes its buffer {name}, and has another reference to it than the "
                "attribute, such as one in a list, which does not follow where copies take the buffer's "
                f"place. To fix: self.{name.rpartition('.')[2]} of the module that registers it alone",
            )


def checked_loss(loss: object) -> torch.Tensor:
    """A loss to begin a backward from.

    Raises:
        ConfigurationError: it is no tensor, not one real number, or nothing learns.
    """
    if not isinstance(loss, torch.Tensor):
        reason = (
            f"the loss is {type(loss).__name__}, not a tensor. To fix: return one number, such as its mean"
        )
    elif loss.numel() != 1:
        reason = f"the loss has shape {tuple(loss.shape)}. To fix: return one number, such as its mean"
    elif loss.is_complex():
        reason = "the loss is complex. To fix: return a real number, such as its abs()"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        reason = (
            "the loss depends on no weight that learns. To fix: neither detach() nor no_grad before it, "
            "and layers of which some have requires_grad"
        )
    else:
        return loss
    raise ConfigurationError("model.name", reason)


def _told(failure: Exception) -> Problem:
    if isinstance(failure, ConfigurationError):
        return failure
    return _ELSEWHERE if _ELSEWHERE in str(failure) else describe(failure)
