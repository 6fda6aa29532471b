"""Consecutive layers as the module of one stage."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ballast_trainer.causes import note_input, note_layer
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.buffers import copies_of, in_place
from ballast_trainer.layers.frozen_outputs import FrozenOutputs
from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.precision import computing_in
from ballast_trainer.layers.repeated_forward import forward_to_repeat
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.profiling.activations import SavedTensors
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.seeding import mixed_key, seed_layer

_NOTHING = contextlib.nullcontext()


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
        self._precision, self._recompute = config.precision, config.recompute
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
        """Whether the output goes to another stage: gloo sends contiguous tensors only."""
        self.sent_as: tuple[tuple[int, ...], torch.dtype] | None = None
        """Shape and type of the message to the next stage, which waits for that many bytes; None: any."""
        self.owns_output = False
        """Whether the output must not be a view: torch's split backward detaches it in place."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Run the layers; outside of a schedule's chunk (shape inference) nothing is measured."""
        meter = self._meter
        microbatch = meter.microbatch
        if self.input_learns != value.requires_grad:
            # A module's attributes are slow to set.
            self.input_learns = value.requires_grad
        if value.requires_grad:
            value = _Entrance.apply(value)  # type: ignore[no-untyped-call]
        key = mixed_key(self._seed, meter.step, meter.first_microbatch + (microbatch or 0))
        frozen = 0
        measured = meter.by_layer and microbatch is not None
        CURRENT_FORWARD.set(meter.step, microbatch)
        if self.entrance is not None:
            value = self.entrance(value)
        kept = meter.start_count(self.indices[0], value)
        with computing_in(self._precision, self._device):
            if microbatch is not None and self.frozen_outputs is not None and not value.requires_grad:
                frozen = self._frozen_layers()
            if frozen and self.frozen_outputs is not None and microbatch is not None:
                layers = self.indices[:frozen]
                value = self.frozen_outputs.output(
                    microbatch, value, layers, functools.partial(self._run_frozen, frozen, key, measured)
                )
                meter.add_output(layers[-1], value, None)
            for held, layer in self._layers[frozen:]:
                index, source = held.index, value.grad_fn
                ACTIVITY.now = ("the forward of layer", index)
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
                    meter.add_output(index, value, source)
                if measured and value.requires_grad:
                    # Runs when the gradient of this output is known: layer index's backward begins.
                    value.register_hook(functools.partial(_enter_backward, meter, index))
        meter.add_kept(list(self.stack))
        if self.indices[-1] < meter.layer_count - 1:
            # No loss to count with it.
            meter.kept = None
        if self.exit is not None:
            value = self.exit(value)
        if self.sends:
            value = value.contiguous()
            if self.sent_as is not None and microbatch is not None:
                self._refuse_other_message(value, self.sent_as)
        if self.owns_output:
            value = own_storage(value)
        meter.message_bytes = value.nbytes
        return value

    def _refuse_other_message(self, value: torch.Tensor, built: tuple[tuple[int, ...], torch.dtype]) -> None:
        if (tuple(value.shape), value.dtype) == built:
            return
        shape, dtype = built
        raise TrainerError(
            f"layer {self.indices[-1]} gives {value.dtype} {list(value.shape)} in step "
            f"{self._meter.step + 1}, and the stage after it waits for {dtype} {list(shape)}, as in the "
            "first step. To fix: batches of data.name that have one shape, e.g. padded to one length, or "
            "one rank"
        )

    def _frozen_layers(self) -> int:
        """How many of the first layers are frozen, and keep no state that a forward changes."""
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
        self, frozen: int, key: int, measured: bool, value: torch.Tensor, first: int, *, redraw: bool = False
    ) -> torch.Tensor:
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
        self, held: Layer, layer: nn.Module, key: int, value: torch.Tensor, kept: SavedTensors | None
    ) -> torch.Tensor:
        """The output of one layer; tensors that it saves for its backward are noted in ``kept``."""
        index = held.index
        if self._recompute and torch.is_grad_enabled():
            if kept is not None and (value.requires_grad or _learns(layer)):
                kept.keep(index, value)
            counts = kept is not None
            return self._recomputed(held, layer, key, value, counts=counts)
        seed_layer(self._device, key, index)
        with kept.saving(index) if kept is not None else _NOTHING:
            return _tensor(index, layer(value))

    def _recomputed(
        self, held: Layer, layer: nn.Module, key: int, value: torch.Tensor, *, counts: bool
    ) -> torch.Tensor:
        found = copies_of(held.stateful)
        step, microbatch = CURRENT_FORWARD.step, CURRENT_FORWARD.microbatch

        def run(value: torch.Tensor) -> torch.Tensor:
            seed_layer(self._device, key, held.index)
            return _tensor(held.index, layer(value))

        def again(value: torch.Tensor) -> torch.Tensor:
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


def own_storage(value: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it is a view of another."""
    return value.clone() if value._is_view() else value


def _tensor(layer: int, output: object) -> torch.Tensor:
    """What a layer has returned, which is one tensor."""
    if not isinstance(output, torch.Tensor):
        raise TrainerError(
            f"layer {layer} returns {type(output).__name__}, not a tensor. To fix: one tensor between "
            "layers, e.g. all that the next layer needs side by side (torch.cat) in its last dimension"
        )
    return output


def _learns(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _enter_backward(meter: Meter, index: int, gradient: torch.Tensor) -> None:
    meter.enter(index)
