"""The interface of a model: two functions.

``build_layer(index)`` makes one layer, and ``loss(output, targets)`` scores the output of the
last.  The model is the composition of layers 0 to ``layer_count`` - 1, each taking the output of the one
before it (a tensor or a tree of them, see ``ballast_trainer.trees``); the first takes the batch's inputs.
A rank builds only the layers it holds; the trainer seeds torch's generator per layer before it calls
``build_layer``, so that a layer starts with the same weights wherever it is built.

A model that is a list of modules is given as that list: :meth:`Model.from_layers`.
"""

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.func import functional_call

from ballast_trainer.causes import with_place
from ballast_trainer.data.collate import Batch, BatchFunction
from ballast_trainer.distributed.activity import tell_compilations
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.models.deferred import deferred_weights
from ballast_trainer.models.loss_weights import LossWeight
from ballast_trainer.models.ties import Tie, merged, search_layers
from ballast_trainer.seeding import host_seeded

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | float]


def no_batch(seed: int, step: int, size: int) -> Batch:
    """The data of a model without any; ``data`` replaces it. Raises NotImplementedError: always."""
    raise NotImplementedError("the model has no data of its own. To fix: set data.name")


def _no_layer(index: int) -> None:
    """No layer is kept: functions make all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as a list of layers.

    Attributes:
        layer_count: how many layers there are.
        build_layer: makes layer ``index``; called on any rank, at any time, in any order.
        loss: mean loss of one microbatch, from the last layer's output and the targets.
        batch: inputs and targets of a step, ``batch(seed, step, size)`` -> tensors whose first
            dimension is ``size``; a pure function, so that every rank sees the same order.  Needed
            where the configuration names no ``data``.
        family: kind of model (``transformer``, ``recurrent``, ...), on which throughput depends.
        independent_layers: a promise that a layer, and the loss, read nothing of other layers but what
            comes in, so that layers can move without a trial of the new stages.
        parameter_name: name of a layer's parameter or buffer in the whole model, from the layer's index and
            the name that it has there, for exports; None: ``index.name``, as ``nn.Sequential`` of the layers
            has it.
        save_whole: writes all parameters and buffers, by their names in the whole model, as a folder for
            ``from_pretrained``; None: the model is none of Hugging Face's.
        tied: parameters that layers share, each as (layer, name) in every layer that has it.  Ties of
            parameters that are the same object are found; those of layers that are built apart are stated.
            The first layer's initial weights count.
        kept_layer: the module that ``build_layer`` copies, by index; None where a function makes the layer.
        metrics: further figures of an evaluation by name, each ``metric(output, targets)`` -> one number, the
            mean of a microbatch as the loss is.
        loss_weight: weight of a microbatch's mean loss in that of the step, from its targets, e.g. how many
            are not -100 (``ballast_trainer.models.loss_weights.counted_targets``).  None: all weigh the same.
        takes_positions: a promise that layer 0 also takes ``{"input_ids", "position_ids"}``, rows of packed
            samples and each token's place in its own, and that no sample attends to another.
        predicts_next: its targets are the tokens that follow its inputs; data whose targets are the inputs'
            own tokens are refused.
        shared_buffers: buffers that are the same object in several modules, as ``tied``: no layer writes one.

    Raises:
        ValueError: a metric's name cannot be one of a figure.
    """

    layer_count: int
    build_layer: Callable[[int], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: BatchFunction = no_batch
    family: str = "custom"
    independent_layers: bool = False
    parameter_name: Callable[[int, str], str] | None = None
    save_whole: Callable[[Mapping[str, torch.Tensor], Path], None] | None = None
    tied: Sequence[Tie] = ()
    kept_layer: Callable[[int], nn.Module | None] = _no_layer
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    loss_weight: LossWeight | None = None
    takes_positions: bool = False
    predicts_next: bool = False
    shared_buffers: Sequence[Tie] = ()

    def __post_init__(self) -> None:
        """Refuse names that figures, files and dashboards cannot have, and losses that are not trained."""
        if _learns(self.loss):
            raise ValueError(
                f"loss: {type(self.loss).__name__} has parameters, and only layers are trained. "
                "To fix: Model.from_layers, which trains them beside the last layer, or requires_grad = False"
            )
        wrong = [name for name in self.metrics if not re.fullmatch("[a-zA-Z][a-zA-Z0-9_]*", name)]
        wrong += [name for name in self.metrics if name == "loss"]
        if wrong:
            raise ValueError(
                f"metrics: {wrong[0]!r} cannot be a metric's name. "
                "To fix: letters, digits and underscores, and not 'loss', which is measured anyway"
            )

    def name_of(self, index: int, name: str) -> str:
        """Name in the whole model of what layer ``index`` calls ``name``."""
        whole = f"{index}.{name}" if self.parameter_name is None else self.parameter_name(index, name)
        # What torch.compile calls the module that it wraps; no model that loads the export has that name.
        return whole.replace("_orig_mod.", "")

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[nn.Module | Callable[[], nn.Module]],
        *,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        batch: BatchFunction = no_batch,
        family: str = "custom",
        independent_layers: bool = False,
        whole: nn.Module | None = None,
        tied: Sequence[Tie] = (),
        metrics: Mapping[str, Metric] | None = None,
        loss_weight: LossWeight | None = None,
    ) -> "Model":
        """A model from a list of modules, or of functions that each make one.

        Modules keep the weights they have (the trainer seeds torch before it calls a builder, so
        that all ranks start alike), and a rank has memory for those of the layers that it holds where
        they can be made again (``ballast_trainer.models.deferred``), as with functions.

        Args:
            layers: the modules, or functions that make them.
            loss: of one microbatch, as of :class:`Model`; the parameters of a module are trained with the
                last layer, and exported as ``loss.name``.
            batch: inputs and targets of a step.
            family: kind of model.
            independent_layers: a promise, see :class:`Model`.
            whole: the module that the layers are parts of, whose names an export uses.
            tied: see :class:`Model`; for functions that make their own weights.
            metrics: see :class:`Model`.
            loss_weight: see :class:`Model`.

        Raises:
            ValueError: two of the modules share what cannot be tied, e.g. running statistics.
        """
        with_loss = None
        if _learns(loss):
            with_loss = len(layers) - 1
            layers = [*layers[:-1], _with_loss(layers[-1], loss)]
            tied = [
                tuple((i, f"layer.{name}" if i == with_loss else name) for i, name in one) for one in tied
            ]
            metrics = {name: _OfOutput(metric) for name, metric in (metrics or {}).items()}
            loss = _TrainedLoss(loss)
        modules = {index: layer for index, layer in enumerate(layers) if isinstance(layer, nn.Module)}
        found = search_layers(modules)
        owners = {
            id(parameter): (index, name)
            for index, module in modules.items()
            for name, parameter in module.named_parameters()
        }

        weights = deferred_weights()

        def build_layer(index: int) -> nn.Module:
            layer = layers[index]
            if index not in modules:
                return layer()
            # The original stays as it was: the layer may be built again, on this rank too.
            copied = _copied(index, modules[index], owners)
            if weights is not None and torch.get_default_device().type == "meta":
                return copied.to("meta")
            if weights is not None:
                weights.fill(modules[index], copied)
            _add_marks(index, modules[index], copied)
            return copied

        return cls(
            layer_count=len(layers),
            build_layer=build_layer,
            loss=loss,
            batch=batch,
            family=family,
            independent_layers=independent_layers,
            parameter_name=_names_in(whole, modules, with_loss),
            tied=merged([*tied, *found.ties()]),
            shared_buffers=found.shared_buffers(),
            kept_layer=modules.get,
            metrics=metrics or {},
            loss_weight=loss_weight,
        )


def layer_without_memory(model: Model, index: int) -> nn.Module:
    """The layer on meta, without memory, if it can be. Raises ConfigurationError: it cannot be built."""
    with host_seeded():
        try:
            with torch.device("meta"):
                return model.build_layer(index)
        except Exception:  # a user's layer that computes with its weights as it is built
            return buildable(model, index)


def buildable(model: Model, index: int) -> nn.Module:
    """The layer as a rank builds it, found out before any starts. Raises ConfigurationError: it cannot be."""
    try:
        layer = model.build_layer(index)
    except (TrainerError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's function may raise anything
        reason = f"layer {index} cannot be built: {with_place(error)}. To fix: the arguments, or the function"
        raise ConfigurationError("model.args", reason) from error
    return checked(layer, index)


def checked(layer: object, index: int) -> nn.Module:
    """The layer that a model has made. Raises ConfigurationError: no module, or one without shapes."""
    if not isinstance(layer, nn.Module):
        reason = f"layer {index} is {type(layer).__name__}, no nn.Module. To fix: return a module"
        raise ConfigurationError("model.name", reason)
    tensors = itertools.chain(layer.parameters(), layer.buffers())
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        reason = (
            f"layer {index} ({type(layer).__name__}) has weights without shapes before its first forward. "
            "To fix: a module that is not lazy, given its sizes"
        )
        raise ConfigurationError("model.name", reason)
    return layer


class _LastLayer(nn.Module):
    """The last layer and the loss's parameters, which travel, learn and are saved with it."""

    def __init__(self, layer: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.layer, self.loss = layer, loss

    def forward(self, value: Any) -> dict[str, Any]:
        """Output of the layer, and the parameters as the loss of this microbatch takes them."""
        # Copies: replicas that share weights let go of theirs after the forward.
        own = {name: parameter.clone() for name, parameter in self.loss.named_parameters()}
        return {"output": self.layer(value), "parameters": own}


class _TrainedLoss(nn.Module):
    """A loss whose parameters come with the last layer's output."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = copy.deepcopy(loss).requires_grad_(False)

    def forward(self, value: Mapping[str, Any], targets: torch.Tensor) -> torch.Tensor:
        """The loss of one microbatch."""
        result: torch.Tensor = functional_call(self.loss, value["parameters"], (value["output"], targets))
        return result


def _learns(loss: object) -> TypeGuard[nn.Module]:
    """True if a loss has parameters to train."""
    return isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters())


def _with_loss(
    layer: nn.Module | Callable[[], nn.Module], loss: nn.Module
) -> nn.Module | Callable[[], nn.Module]:
    """The last layer with the loss's parameters; as a function where it is one."""
    if isinstance(layer, nn.Module):
        return _LastLayer(layer, loss)
    return lambda: _LastLayer(layer(), copy.deepcopy(loss))


class _OfOutput(nn.Module):
    """A metric of what the last layer itself computes."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def forward(self, value: Any, targets: torch.Tensor) -> torch.Tensor | float:
        """The metric of one microbatch."""
        return self.metric(value["output"], targets)


def _names_in(
    whole: nn.Module | None, modules: Mapping[int, nn.Module], with_loss: int | None
) -> Callable[[int, str], str] | None:
    """The names that the layers' parameters and buffers have in ``whole``; None: as :class:`Model` has them.

    A tensor that has several names there (tied weights) gives each layer one of them.  ``with_loss``: the
    layer that has the loss's parameters, too.
    """

    def usual(index: int, name: str) -> str:
        if index != with_loss:
            return f"{index}.{name}"
        return name if name.startswith("loss.") else f"{index}.{name.removeprefix('layer.')}"

    if whole is None:
        return None if with_loss is None else usual
    of_whole: dict[int, list[str]] = {}
    for name, value in whole.state_dict(keep_vars=True).items():
        of_whole.setdefault(id(value), []).append(name)
    names = {}
    for index, layer in modules.items():
        for name, value in layer.state_dict(keep_vars=True).items():
            known = of_whole.get(id(value))
            if known is not None:
                names[index, name] = known.pop(0) if len(known) > 1 else known[0]
    return lambda index, name: names.get((index, name)) or usual(index, name)


def _copied(index: int, module: nn.Module, owners: Mapping[int, tuple[int, str]]) -> nn.Module:
    """A copy of a layer with all that it refers to.

    Args:
        index: of the layer.
        module: the layer.
        owners: a layer and a name by the identity of each parameter.

    Raises:
        ConfigurationError: it refers to another layer's parameter in a way that PyTorch does not see, has
            computed something that no forward computes again, or has no copy that learns.
    """
    copies: dict[int, Any] = {}
    for part in module.modules():
        # What torch.nn.utils.weight_norm, spectral_norm and prune compute before each forward.
        hooks = [vars(hook) for hook in part._forward_pre_hooks.values() if hasattr(hook, "__dict__")]
        again = {hook.get("name", hook.get("_tensor_name")) for hook in hooks}
        for name, value in vars(part).items():
            if not isinstance(value, torch.Tensor) or value.is_leaf:
                continue
            if name not in again:
                raise ConfigurationError(
                    "model.name",
                    f"layer {index} keeps {name!r}, which was computed from weights before they learn. "
                    "To fix: compute it in the forward",
                )
            copies[id(value)] = value.detach().clone()
    layer = copy.deepcopy(module, copies)
    computed = [name for name, parameter in layer.named_parameters() if not parameter.is_leaf]
    if computed:
        raise ConfigurationError(
            "model.name",
            f"PyTorch's copy of layer {index} cannot learn {computed[0]!r}, as of what torch.jit.script "
            "returns. To fix: the plain module (training.compile compiles it), or give Model.from_layers a "
            "function that makes the layer",
        )
    own = {id(parameter) for parameter in module.parameters()}
    for identity in (owners.keys() & copies.keys()) - own:
        other, name = owners[identity]
        raise ConfigurationError(
            "model.name",
            f"layer {index} refers to {name!r} of layer {other} without having it among its parameters, so "
            "it would learn apart. To fix: assign the parameter to an attribute of the layer's module",
        )
    for original, copied in zip(module.modules(), layer.modules(), strict=True):
        if original._compiled_call_impl is not None:
            # A copy is not compiled, and does not know the options.
            compile_layer(copied)
    return layer


def compile_layer(module: nn.Module) -> None:
    """Compile it in place with torch's defaults, but for what it draws.

    That must not depend on where its graph breaks, as it does between tensor parts.
    """
    tell_compilations()
    module.compile(options={"fallback_random": True})


def _add_marks(index: int, module: nn.Module, layer: nn.Module) -> None:
    """Give the parameters of a layer's copy what PyTorch's copies are without: attributes and hooks.

    Raises:
        ConfigurationError: a hook refers to a parameter that is not trained, as the copy is, or to a variable
            without a value.
    """
    made, own = dict(layer.named_parameters()), {id(parameter) for parameter in module.parameters()}
    for name, parameter in module.named_parameters():
        vars(made[name]).update(vars(parameter))
        if not parameter.requires_grad:
            # Torch calls the hooks of a frozen one never, and takes no new ones.
            continue
        of_gradient = (parameter._backward_hooks or {}).values()
        of_sum = (parameter._post_accumulate_grad_hooks or {}).values()
        for hook in (*of_gradient, *of_sum):
            try:
                cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
            except ValueError as error:
                raise ConfigurationError(
                    "model.name",
                    f"a hook of {name!r} of layer {index}, {hook.__qualname__}, uses one of the variables "
                    f"{', '.join(hook.__code__.co_freevars)}, which has no value yet. "
                    "To fix: assign it before the model is made",
                ) from error
            held = [*cells, *(getattr(hook, "__defaults__", None) or ())]
            if any(id(one) in own for one in held):
                raise ConfigurationError(
                    "model.name",
                    f"a hook of {name!r} of layer {index} refers to a parameter of the module, and a copy of "
                    "the module is trained. To fix: give Model.from_layers a function that makes the layer",
                )
        for hook in of_gradient:
            made[name].register_hook(hook)
        for hook in of_sum:
            made[name].register_post_accumulate_grad_hook(hook)
