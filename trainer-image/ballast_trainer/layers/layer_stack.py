"""Consecutive layers as the module of one stage."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ballast_trainer.causes import note_input, note_layer
from ballast_trainer.distributed.activity import ACTIVITY, Limit
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.buffers import copies_of, in_place, renew
from ballast_trainer.layers.frozen_outputs import FrozenOutputs
from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.precision import computing_in
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.profiling.activations import SavedTensors
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.seeding import mixed_key, seed_layer
from ballast_trainer.trees import Tree, byte_count, flatten, learns, mapped, tensors_of

_NOTHING = contextlib.nullcontext()
_BACKWARD = 0xBACC


class LayerStack(nn.Module):
    """Consecutive layers as the module of one stage; seeds and meters each layer."""

    def __init__(self, layers: list[Layer], meter: Meter, seed: int, device: torch.device) -> None:
        super().__init__()
        self.held = layers
        self.indices = [layer.index for layer in layers]
        self.stack = nn.ModuleList(layer.module for layer in layers)
        self._meter = meter
        self._seed = seed
        self._device = device
        config = layers[0].config
        self._precision, self._repeated = config.precision, config.repeated
        self.input_learns = False
        self.frozen_outputs: FrozenOutputs | None = None
        """Keeps what frozen layers put out; None: nothing is kept."""
        self._frozen: int | None = None
        # A list, not a module, since it is iterated for every microbatch.
        self._layers = list(zip(layers, self.stack, strict=True))
        self.entrance: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Converts a message of the stage before to the first layer's input; None: no conversion."""
        self.exit: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Converts the last layer's output to the message to the next stage; None: no conversion."""
        self.sends = False
        """True if the output goes to another stage: gloo sends contiguous tensors only."""
        self.sent_as: Boundary | None = None
        """The message to the next stage, which waits for that many bytes; None: any."""
        self.layer_ended: tuple[int | None, Callable[[int], None]] | None = None
        """The microbatch whose backward counts (None: of each), and what is told that one has gone past a
        layer, the last layer's first whatever autograd's order."""
        self._left = list(self.indices)
        self._passed: set[int] = set()
        # Whose forward draws from torch alone; behind the last layer comes a loss, which need not.
        self._of_torch = {
            layer.index
            for layer in layers
            if layer.index < meter.layer_count - 1 and _is_of_torch(layer.module)
        }
        # By layer, once a graph of it was seen.
        self._own_backward: dict[int, bool] = {}

    def forward(self, value: Tree) -> Tree:
        """Run the layers; outside of a schedule's chunk (shape inference) nothing is measured."""
        meter = self._meter
        microbatch = meter.microbatch
        value = self._entered(self.held[0].taken(value))
        key = mixed_key(self._seed, meter.step, meter.first_microbatch + (microbatch or 0))
        frozen = 0
        measured = meter.by_layer and microbatch is not None
        CURRENT_FORWARD.set(meter.step, microbatch)
        if self.entrance is not None and isinstance(value, torch.Tensor):
            value = self.entrance(value)
        kept = meter.start_count(self.indices[0], value)
        with computing_in(self._precision, self._device):
            if microbatch is not None and self.frozen_outputs is not None and not self.input_learns:
                frozen = self._frozen_layers()
            if frozen and self.frozen_outputs is not None and microbatch is not None:
                layers = self.indices[:frozen]
                value = self.frozen_outputs.output(
                    microbatch, value, layers, functools.partial(self._run_frozen, frozen, key, measured)
                )
                meter.add_output(layers[-1], value, ())
            for held, layer in self._layers[frozen:]:
                index = held.index
                sources = _nodes(value) if kept is not None or measured else ()
                ACTIVITY.now = (Limit.ANY, "the forward of layer", index)
                if measured:
                    meter.enter(index)
                try:
                    value = self._run_layer(held, layer, key, value, kept)
                except Exception as error:
                    note_layer(error, held.index, type(held.module).__name__)
                    note_input(error, index, value)
                    raise
                finally:
                    ACTIVITY.now = None
                if kept is not None:
                    meter.add_output(index, value, sources)
                if measured:
                    _tell_backward(meter, index, value, sources)
        meter.add_kept(list(self.stack))
        if self.indices[-1] < meter.layer_count - 1:
            # No loss to count with it.
            meter.kept = None
        if self.exit is not None and isinstance(value, torch.Tensor):
            value = self.exit(value)
        if self.sends:
            value = mapped(torch.Tensor.contiguous, value)
            if microbatch is not None:
                self._refuse_other_message(value)
        meter.message_bytes = byte_count(value)
        return value

    def _entered(self, value: Tree) -> Tree:
        if self.input_learns != learns(value):
            # A module's attributes are slow to set.
            self.input_learns = not self.input_learns
        return mapped(_enter, value) if self.input_learns else value

    def _refuse_other_message(self, value: Tree) -> None:
        built, (tensors, structure) = self.sent_as, flatten(value)
        if built is None or built.takes(tensors, structure):
            return
        what = "" if structure == built.structure else ", in another structure or with other constants"
        raise TrainerError(
            f"layer {self.indices[-1]} gives {Boundary.of(value)} in step {self._meter.step + 1}, and the "
            f"stage after it waits for {built}, as in the first step{what}. To fix: batches of data.name "
            "that have one shape, e.g. padded to one length, or one rank"
        )

    def _frozen_layers(self) -> int:
        """Number of first layers that are frozen, and keep no state that a forward changes."""
        if self.frozen_outputs is None or not self.frozen_outputs.runs:
            return 0
        if self._frozen is None:
            learning = (at for at, (_, layer) in enumerate(self._layers) if _learns(layer))
            count = next(learning, len(self._layers))
            # Layers without parameters in front of the first that learns cost nothing worth keeping.
            weights = any(True for _, layer in self._layers[:count] for _ in layer.parameters())
            stateful = any(held.stateful for held, _ in self._layers[:count])
            self._frozen = count if weights and not stateful else 0
        return self._frozen

    def _run_frozen(
        self, frozen: int, key: int, measured: bool, value: Tree, first: int, *, redraw: bool = False
    ) -> Tree:
        """The output of the first ``frozen`` layers from layer ``first`` on."""
        for held, layer in self._layers[first - self.indices[0] : frozen]:
            if measured:
                self._meter.enter(held.index)
            try:
                value = self._run_layer(held, layer, key + 1 if redraw else key, value, None)
            except Exception as error:
                note_layer(error, held.index, type(held.module).__name__)
                raise
        return value

    def _run_layer(
        self, held: Layer, layer: nn.Module, key: int, value: Tree, kept: SavedTensors | None
    ) -> Tree:
        """The output of one layer; tensors that it saves for its backward are noted in ``kept``."""
        index, tells = held.index, self._tells(self._meter.microbatch)
        may_draw = self._own_backward.get(index, True) and torch.is_grad_enabled()
        sources = _nodes(value) if held.is_sharded or may_draw else ()
        held.gather()
        has_run = False

        def passed(_: torch.Tensor) -> None:
            # A layer may compute gradients of its input in its forward.
            if has_run:
                self._backward_passed([index])

        if tells:
            for tensor in tensors_of(value):
                if tensor.requires_grad:
                    # Once autograd has left the layer, also where a later one takes this tensor: its nodes
                    # run in the reverse order of their forwards.
                    tensor.register_hook(passed)
        if self._repeated and (index + 1) % self._repeated == 0 and torch.is_grad_enabled():
            if kept is not None and (learns(value) or _learns(layer)):
                for tensor in tensors_of(value):
                    kept.keep(index, tensor)
            output = self._recomputed(held, layer, key, value, counts=kept is not None)
        else:
            if torch.is_grad_enabled():
                renew(held.stateful)
            seed_layer(self._device, key, index, torch_alone=index in self._of_torch)
            with kept.saving(index) if kept is not None else _NOTHING:
                output = _sendable(index, layer(value))
        has_run = True
        if held.is_sharded and torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.grad_fn is not None and tensor.grad_fn not in sources:
                    tensor.register_hook(lambda _: self._backward_enters(held, tells=tells))
        if may_draw:
            self._seed_backward(index, layer, key, output, sources)
        return output

    def _seed_backward(
        self, index: int, layer: nn.Module, key: int, output: Tree, sources: tuple[Any, ...]
    ) -> None:
        """Seed what Python code of the user's draws in a backward, as what a forward draws."""
        results = [tensor for tensor in tensors_of(output) if tensor.grad_fn not in (None, *sources)]
        if results and index not in self._own_backward:
            hooked = any(parameter._backward_hooks for parameter in layer.parameters())
            self._own_backward[index] = hooked or _has_own_backward(_nodes(results), sources)
        if self._own_backward.get(index):
            for tensor in results:
                tensor.register_hook(lambda _: seed_layer(self._device, mixed_key(key, _BACKWARD), index))

    def _backward_enters(self, held: Layer, *, tells: bool) -> None:
        """Autograd is about to run what this layer has computed, for which its weights are needed again."""
        if tells:
            self._backward_passed(self.indices[held.index - self.indices[0] + 1 :])
        held.gather()

    def _tells(self, microbatch: int | None) -> bool:
        return self.layer_ended is not None and self.layer_ended[0] in (None, microbatch)

    def backward_ended(self, microbatch: int | None) -> None:
        """The backward of a microbatch of the step, or of a trial, has gone past all layers."""
        if self._tells(microbatch):
            self._backward_passed(self.indices)
            self._left, self._passed = list(self.indices), set()

    def _backward_passed(self, indices: Iterable[int]) -> None:
        assert self.layer_ended is not None
        self._passed.update(indices)
        while self._left and self._left[-1] in self._passed:
            index = self._left.pop()
            held = self.held[index - self.indices[0]]
            if held.is_sharded and (
                self.input_learns or any(map(_learns, self.stack[: index - self.indices[0] + 1]))
            ):
                # Replicas gather in one order, also where this one's backward has gone around the layer.
                held.gather()
            self.layer_ended[1](index)

    def _recomputed(self, held: Layer, layer: nn.Module, key: int, value: Tree, *, counts: bool) -> Tree:
        found = copies_of(held.stateful)
        step, microbatch = CURRENT_FORWARD.step, CURRENT_FORWARD.microbatch

        def run(value: Tree) -> Tree:
            seed_layer(self._device, key, held.index)
            return _sendable(held.index, layer(value))

        def again(value: Tree) -> Tree:
            CURRENT_FORWARD.set(step, microbatch)
            # Starts from the buffers that the first forward found, and leaves them unchanged.
            try:
                with in_place(found), computing_in(self._precision, self._device):
                    return run(value)
            except Exception as error:
                note_layer(error, held.index, type(held.module).__name__)
                raise

        def count(kept: list[torch.Tensor]) -> None:
            self._meter.add_repeated(held.index, layer, value, kept)

        return forward_to_repeat(run, again, value, count if counts else None)


class _Entrance(torch.autograd.Function):
    """A stage's input on its way to the first layer: no leaf, so that hooks and in-place layers may have it.

    The buffer that an input was received in is used in every step; hooks on it would stay.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # gloo sends contiguous tensors only, and a layer's backward need not return one.
        return gradient.contiguous()


def _enter(value: torch.Tensor) -> torch.Tensor:
    entered: torch.Tensor = _Entrance.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]
    return entered


def _nodes(value: Tree) -> tuple[Any, ...]:
    """The nodes that have computed what a layer takes; its input may be none."""
    return tuple(tensor.grad_fn for tensor in tensors_of(value) if tensor.grad_fn is not None)


def own_function(node: Any) -> str | None:
    """The module of a node's ``torch.autograd.Function``; None: it has none, or one of the trainer's."""
    module: str = getattr(getattr(type(node), "_forward_cls", None), "__module__", "ballast_trainer.")
    return None if module.startswith("ballast_trainer.") else module


def _has_own_backward(results: tuple[Any, ...], sources: tuple[Any, ...]) -> bool:
    """True if a ``torch.autograd.Function`` that is not the trainer's is between sources and results."""
    seen, left = set(sources), list(results)
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if own_function(node) is not None:
            return True
        left += [child for child, _ in node.next_functions]
    return False


def _sendable(layer: int, output: Tree) -> Tree:
    """Output of a layer, checked: a tensor, or a tree of them."""
    if not isinstance(output, torch.Tensor):
        try:
            flatten(output)
        except TypeError as error:
            raise TrainerError(
                f"layer {layer} returns {type(output).__name__}: {error}. To fix: a tensor, or tensors, "
                "None, numbers and text in tuples, lists, dicts and dataclasses"
            ) from None
    return output


def _is_of_torch(layer: nn.Module) -> bool:
    """True if no code of the user's runs in a layer's forward: it draws neither from numpy nor Python."""
    return all(
        type(part).__module__.startswith("torch.nn.modules.")
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        and not any(map(_is_function_of_users, vars(part).values()))
        for part in layer.modules()
    )


def _is_function_of_users(attribute: object) -> bool:
    """True of a user's function, such as the activation of a ``nn.TransformerEncoderLayer``."""
    module = getattr(attribute, "__module__", None) or "torch"
    return callable(attribute) and module.partition(".")[0] != "torch"


def _learns(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _tell_backward(meter: Meter, index: int, value: Tree, sources: tuple[Any, ...]) -> None:
    """Tell the meter when a gradient of what the layer has computed is known: its backward begins."""
    for tensor in tensors_of(value):
        if tensor.requires_grad and tensor.grad_fn not in sources:
            tensor.register_hook(lambda _: meter.enter(index))


def forward_to_repeat(
    run: Callable[[Tree], Tree],
    again: Callable[[Tree], Tree],
    value: Tree,
    count: Callable[[list[torch.Tensor]], None] | None = None,
) -> Tree:
    """``run(value)``, whose graph keeps ``value`` alone until the backward needs more.

    What the repeat has computed is kept until autograd has no more use for it: of an undivided backward,
    until each operation's backward is done; of one in two halves, from the input's half, which repeats, to
    the weights' half, as without repeats.  ``torch.utils.checkpoint`` repeats in each call of autograd: of a
    split backward in the input's half and once more for each group of weights.

    Args:
        run: the layer.
        again: the layer once more, with the same results; called in the backward, at most once.
        value: its input.
        count: is told the tensors that the repeat keeps; None: they are not counted.

    Raises:
        RuntimeError: in the backward: ``run`` has changed its input, or ``again`` keeps other tensors.
    """
    repeat = _Repeat(again, value, count)
    with torch.autograd.graph.saved_tensors_hooks(repeat.pack, repeat.unpack):
        return run(value)


class _Place:
    """Place of a tensor that autograd has saved; empty until the forward is repeated."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None


class _AllRepeatedError(BaseException):
    """Ends a repeat once nothing that is missing follows; no layer's ``except Exception`` takes it."""


class _Repeat:
    """The saved tensors of one forward: the graph holds their places, and each place its tensor."""

    def __init__(
        self,
        again: Callable[[Tree], Tree],
        value: Tree,
        count: Callable[[list[torch.Tensor]], None] | None,
    ) -> None:
        self._again, self._count = again, count
        # Without its graph: a module may keep a part of this one, as torch.nn.utils.weight_norm does.
        self._value = mapped(_leaf, value)
        self._versions = [tensor._version for tensor in tensors_of(self._value)]
        self._places: list[weakref.ref[_Place]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []

    def pack(self, tensor: torch.Tensor) -> _Place:
        """A place for what autograd saves."""
        place = _Place()
        self._places.append(weakref.ref(place))
        self._kinds.append((tensor.shape, tensor.dtype))
        return place

    def unpack(self, place: _Place) -> torch.Tensor:
        """The tensor of a place, after a repeat if it has none."""
        if place.tensor is None:
            self._fill()
        assert place.tensor is not None
        return place.tensor

    def _fill(self) -> None:
        value = self._value
        if [tensor._version for tensor in tensors_of(value)] != self._versions:
            raise RuntimeError(
                "training.recompute repeats a layer's forward from its input, but the layer has changed its "
                "input in place. To fix: let it compute a new tensor, or set training.recompute: false"
            )
        filled = 0
        # Kind of the tensor before, where torch.rrelu may draw it as noise once it has kept its input, too.
        drawn: tuple[torch.Size, torch.dtype] | None = None

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal filled, drawn
            kind = (tensor.shape, tensor.dtype)
            if filled == len(self._places) or kind != self._kinds[filled]:
                raise RuntimeError(_other(f"tensor {filled + 1} that it keeps is {_named(*kind)}"))
            place = self._places[filled]()
            # An output that knows the node that keeps it would be a cycle.
            kept = tensor.detach()
            if place is not None:
                place.tensor = kept
            filled += 1
            if filled == len(self._places) and kind != drawn:
                raise _AllRepeatedError
            constant = tensor.is_leaf and not tensor.requires_grad and not isinstance(tensor, nn.Parameter)
            drawn = kind if constant else None
            return kept

        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(fill, lambda kept: kept):
                self._again(mapped(_leaf, value))
        except (_AllRepeatedError, RuntimeError):
            # A RuntimeError in its place comes from TorchScript, through which it has passed.
            if filled < len(self._places):
                raise
        if filled < len(self._places):
            raise RuntimeError(_other(f"it keeps {filled} tensors, at first {len(self._places)}"))
        if self._count is not None:
            found = [place.tensor for place in (each() for each in self._places) if place is not None]
            self._count([tensor for tensor in found if tensor is not None])


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _named(shape: torch.Size, kind: torch.dtype) -> str:
    return f"{str(kind).removeprefix('torch.')}{list(shape)}"


def _other(reason: str) -> str:
    return (
        f"a layer's forward is not the same when it is repeated for the backward: {reason}. "
        "To fix: let it depend on its input, its weights and torch's random numbers alone, "
        "or set training.recompute: false"
    )
