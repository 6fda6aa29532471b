"""The layers that a rank holds: modules, their optimizers, and the stack that a stage runs.

Each layer has an optimizer of its own, so that a layer's whole state is one dictionary of tensors
that can be moved, saved and loaded without looking at other layers.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from ballast_policies.contract.job import TrainingConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from ballast_trainer.layers.optimizer_state import (
    as_tensors,
    from_tensor,
    group_settings,
    refuse_state_in_groups,
)
from ballast_trainer.layers.precision import computing_in
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import load_callable
from ballast_trainer.profiling.activations import SavedTensors
from ballast_trainer.profiling.profile import Meter
from ballast_trainer.seeding import mixed_key, seed_build, seed_layer

MODULE, OPTIMIZER = "module.", "optimizer."
"""Prefixes of a layer's tensors: ``module.<name>`` and ``optimizer.<parameter>.<key>``."""

_NOTHING = contextlib.nullcontext()


def _make_optimizer(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        # One call for all tensors of a layer; a quarter of the time of torch's default on a CPU.
        fused = all(p.device.type == "cpu" and p.is_floating_point() for p in parameters)
        return torch.optim.AdamW(
            parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused or None
        )
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.learning_rate, momentum=0.9, weight_decay=config.weight_decay
        )
    maker = load_callable("training.optimizer", config.optimizer)
    optimizer: torch.optim.Optimizer = maker(parameters, config.learning_rate)
    return optimizer


class Layer:
    """One layer with its optimizer; None for a layer without parameters."""

    def __init__(self, index: int, module: nn.Module, config: TrainingConfig) -> None:
        self.index = index
        self.module = module
        self.config = config
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.Optimizer | None:
        parameters = list(self.module.parameters())
        if not parameters:
            return None
        optimizer = _make_optimizer(parameters, self.config)
        self._group_settings = group_settings(optimizer)
        return optimizer

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of the layer; module tensors are the live ones, not copies.

        Raises:
            TrainerError: the optimizer keeps state that cannot travel.
        """
        tensors = {MODULE + name: value for name, value in self.module.state_dict().items()}
        if self.optimizer is not None:
            refuse_state_in_groups(self.optimizer, self._group_settings)
            for name, parameter in self.module.named_parameters():
                kept = as_tensors(self.optimizer, self.optimizer.state.get(parameter, {}))
                tensors |= {f"{OPTIMIZER}{name}.{key}": value for key, value in kept.items()}
        return tensors

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over the tensors of another rank's layer, or of a checkpoint.

        Raises:
            RuntimeError: names or shapes of the module's tensors differ.
        """
        module = {name.removeprefix(MODULE): v for name, v in tensors.items() if name.startswith(MODULE)}
        self.module.load_state_dict(module)
        # Loading may have replaced parameters: a pruned weight comes as its kept values.
        self.optimizer = self._new_optimizer()
        if self.optimizer is None:
            return
        parameters = dict(self.module.named_parameters())
        for name, value in tensors.items():
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
                held = parameters[parameter]
                plain, restored = from_tensor(key, value, held.device)
                self.optimizer.state[held][plain] = restored

    def replace_parameter(self, old: nn.Parameter, new: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """Let the optimizer continue with ``new`` in place of ``old``, which may be the same.

        Args:
            old: a parameter of the layer.
            new: what has taken its place in the module.
            state: those entries of the optimizer's state that have changed with it.
        """
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        kept = {**self.optimizer.state.pop(old, {}), **state}
        if kept:
            self.optimizer.state[new] = kept

    def byte_count(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        state = sum(tensor.nbytes for tensor in self.state().values())
        return state + sum(p.nbytes for p in self.module.parameters() if p.requires_grad)


class LayerSet:
    """The layers that this rank holds, by index.

    Attributes:
        device: where they live.
        seed: of their initial weights and of dropout.
    """

    def __init__(
        self,
        model: Model,
        config: TrainingConfig,
        device: torch.device,
        prepare: Callable[[int, nn.Module], nn.Module],
    ) -> None:
        self._model = model
        self._config = config
        self.device = device
        self.seed = config.seed
        self._prepare = prepare
        self._held: dict[int, Layer] = {}

    def __iter__(self) -> Iterator[Layer]:
        return iter([self._held[index] for index in sorted(self._held)])

    def __getitem__(self, index: int) -> Layer:
        return self._held[index]

    def indices(self) -> tuple[int, ...]:
        """Indices of the layers held, ascending."""
        return tuple(sorted(self._held))

    def make(self, index: int) -> Layer:
        """Build layer ``index`` with its initial weights, without holding it."""
        state = torch.default_generator.get_state()
        seed_build(seed=self.seed, layer=index)
        module = self._prepare(index, self._model.build_layer(index)).to(self.device)
        torch.default_generator.set_state(state)
        return Layer(index, module, self._config)

    def hold(self, layers: Iterable[Layer]) -> None:
        """Hold these layers too."""
        self._held.update({layer.index: layer for layer in layers})

    def drop(self, indices: Iterable[int]) -> None:
        """Release layers."""
        for index in indices:
            del self._held[index]

    def parameters(self) -> list[nn.Parameter]:
        """All parameters held."""
        return [parameter for layer in self for parameter in layer.module.parameters()]


class LayerStack(nn.Module):
    """Consecutive layers as the module of one stage; seeds and meters each layer."""

    def __init__(self, layers: list[Layer], meter: Meter, seed: int, device: torch.device) -> None:
        super().__init__()
        self.indices = [layer.index for layer in layers]
        self.stack = nn.ModuleList(layer.module for layer in layers)
        self._meter = meter
        self._seed = seed
        self._device = device
        config = layers[0].config
        self._precision, self._recompute = config.precision, config.recompute
        self.input_learns = False
        # A list, not a module, since it is iterated for every microbatch.
        self._layers = list(zip(self.indices, self.stack, strict=True))
        self.entrance: Callable[[torch.Tensor], torch.Tensor] | None = None
        """What makes the first layer's input of what another stage sent; None: nothing to make."""
        self.exit: Callable[[torch.Tensor], torch.Tensor] | None = None
        """What makes the message to the next stage of the last layer's output."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Run the layers; outside of a schedule's chunk (shape inference) nothing is measured."""
        meter = self._meter
        microbatch = meter.microbatch
        if self.input_learns != value.requires_grad:
            # A module's attributes are slow to set.
            self.input_learns = value.requires_grad
        if value.requires_grad:
            # gloo sends contiguous tensors only, and a layer's backward need not return one.
            value.register_hook(torch.Tensor.contiguous)
        key = mixed_key(self._seed, meter.step, meter.first_microbatch + (microbatch or 0))
        measured = meter.by_layer and microbatch is not None
        if self.entrance is not None:
            value = self.entrance(value)
        kept = meter.start_count(self.indices[0], value)
        with computing_in(self._precision, self._device):
            for index, layer in self._layers:
                if measured:
                    meter.enter(index)
                value = self._run_layer(index, layer, key, value, kept)
                if kept is not None:
                    meter.output_bytes[index] = value.nbytes
                if measured and value.requires_grad:
                    # Runs when the gradient of this output is known: layer index's backward begins.
                    value.register_hook(functools.partial(_enter_backward, meter, index))
        meter.add_kept(list(self.stack))
        if self.indices[-1] < meter.layer_count - 1:
            # No loss to count with it.
            meter.kept = None
        if self.exit is not None:
            value = self.exit(value)
        meter.message_bytes = value.nbytes
        return value

    def _run_layer(
        self, index: int, layer: nn.Module, key: int, value: torch.Tensor, kept: SavedTensors | None
    ) -> torch.Tensor:
        """The output of one layer; what it saves for its backward is noted in ``kept``."""
        if self._recompute and torch.is_grad_enabled():
            if kept is not None and (value.requires_grad or _learns(layer)):
                kept.keep(index, value)
            return self._recomputed(index, layer, key, value)
        seed_layer(self._device, key, index)
        with kept.saving(index) if kept is not None else _NOTHING:
            output: torch.Tensor = layer(value)
        return output

    def _recomputed(self, index: int, layer: nn.Module, key: int, value: torch.Tensor) -> torch.Tensor:
        def run(value: torch.Tensor) -> torch.Tensor:
            seed_layer(self._device, key, index)
            output: torch.Tensor = layer(value)
            return output

        # The second forward seeds itself as the first did: no generator state to keep.
        recomputed: torch.Tensor = checkpoint(run, value, use_reentrant=False, preserve_rng_state=False)
        return recomputed


def _learns(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _enter_backward(meter: Meter, index: int, gradient: torch.Tensor) -> None:
    meter.enter(index)
