"""The layers that a rank holds: modules and their optimizers.

Each layer has its own optimizer, so that a layer's whole state is one dictionary of tensors
that can be moved, saved and loaded without looking at other layers.
"""

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from ballast_policies.contract.job.training import TrainingConfig
from torch import nn

from ballast_trainer.causes import with_place
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.layers.optimizer_state import (
    as_tensors,
    from_tensor,
    kept_elsewhere,
    laid_out_as,
    refuse_other_state,
    update_instead,
)
from ballast_trainer.layers.precision import in_bf16, inputs_in_bf16
from ballast_trainer.layers.shared_experts import names_of_experts, shared_experts
from ballast_trainer.layers.zero import (
    Share,
    WholeWeights,
    mixes_numbers,
    mixes_parameters,
    own_parts_in_place,
    shares_of,
    take_part,
)
from ballast_trainer.models.deferred import build_to_follow
from ballast_trainer.models.protocol import Model, compile_layer
from ballast_trainer.models.registry import load_callable
from ballast_trainer.seeding import host_seeded, seed_build
from ballast_trainer.trees import Tree

logger = logging.getLogger(__name__)

MODULE, OPTIMIZER = "module.", "optimizer."
"""Prefixes of a layer's tensors: ``module.<name>`` and ``optimizer.<parameter>.<key>``."""
MASTER = "master"
"""Key of the fp32 copy of a bf16 parameter, which its optimizer updates."""
_UNSAVED = "unsaved."
"""Prefix of buffers that are not persistent: they move with their layer, and those that a forward writes are
saved."""


OWN_OPTIMIZERS = ("adamw", "sgd")
"""Optimizers of ``training.optimizer`` that are no function of the user's."""
_FUSED_ON = ("cpu", "cuda")
_OF_DEVICES = re.compile(r"cpu|gpu|cuda|rocm|triton|nvidia|device", re.IGNORECASE)
"""Words of errors of optimizers that step on a GPU alone."""


def _make_optimizer(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        # One call for all tensors of a layer; a quarter of the time of torch's default on a CPU.
        fused = all(p.device.type in _FUSED_ON and p.is_floating_point() for p in parameters)
        return torch.optim.AdamW(
            parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused or None
        )
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.learning_rate, momentum=0.9, weight_decay=config.weight_decay
        )
    maker = load_callable("training.optimizer", config.optimizer)
    shapes = [tuple(p.shape) for p in parameters]
    try:
        optimizer = maker(parameters, config.learning_rate)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's function may raise anything
        if not any(p.requires_grad for p in parameters):
            # It has nothing to update; one that takes those that learn alone finds none.
            return torch.optim.SGD(parameters, lr=config.learning_rate)
        reason = (
            f"{config.optimizer} does not take a layer's parameters of shapes {shapes} and a learning rate: "
            f"{with_place(error)}. "
            "To fix: name a function that gives each parameter the optimizer that suits it"
        )
        raise ConfigurationError("training.optimizer", reason) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        reason = f"{config.optimizer} returned {type(optimizer).__name__}. To fix: return a torch optimizer"
        raise ConfigurationError("training.optimizer", reason)
    needs = inspect.signature(optimizer.step).parameters.get("closure")
    if needs is not None and needs.default is inspect.Parameter.empty:
        reason = (
            f"{config.optimizer} computes the loss again within its step (a closure), which a pipeline "
            "cannot. To fix: an optimizer that steps by gradients alone"
        )
        raise ConfigurationError("training.optimizer", reason)
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if updated.difference(map(id, parameters)):
        reason = (
            f"{config.optimizer} returned an optimizer of other parameters than the layer's, of shapes "
            f"{shapes}. To fix: an optimizer of those that it is given"
        )
        raise ConfigurationError("training.optimizer", reason)
    left_out = tuple(tuple(p.shape) for p in parameters if p.requires_grad and id(p) not in updated)
    if left_out:
        _tell_left_out(config.optimizer, left_out)
    return optimizer


@functools.lru_cache(maxsize=64)
def _tell_left_out(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    logger.warning(
        "training.optimizer: %s leaves out parameters of a layer, of shapes %s: they do not learn",
        name,
        shapes,
    )


class Layer:
    """One layer with its optimizer; None for a layer without parameters of its own.

    Attributes:
        tied: names of its parameters that other layers have too, by the number of the tie in the model.
        copies: those of them that another layer owns: its optimizer updates them, this one's does not.
        fixed: names of its parameters that do not learn in the model itself.
        shares: by parameter, the part that this replica's optimizer updates; empty where it updates all.
        weight_shares: by name in the module's state, the part that this replica has; empty where it has all.
        of_experts: names of its parameters that this replica has alone.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        config: TrainingConfig,
        *,
        tied: Mapping[int, str] | None = None,
        copies: Collection[str] = (),
        replicas: Axis | None = None,
        whole: WholeWeights | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.config = config
        self.tied = dict(tied or {})
        self.copies = frozenset(copies)
        fixed = [name for name, p in module.named_parameters() if not p.requires_grad]
        # A weight is called ``values`` once it is sparse.
        self.fixed = frozenset(fixed + [re.sub(r"\bweight$", "values", name) for name in fixed])
        self.stateful: tuple[nn.Module, ...] = ()
        """Modules in it whose buffers its forward changes, as the last trial of a plan has seen."""
        self.shares: dict[str, Share] = {}
        self.weight_shares: dict[str, Share] = {}
        self._replicas, self._whole = replicas, whole
        self._by_parameter: dict[nn.Parameter, Share] = {}
        self._masters: dict[str, nn.Parameter] = {}
        self.of_experts = names_of_experts(module)
        self._arrival: Callable[[], object] | None = None
        self._optimizer = self._new_optimizer(in_bf16(module) if config.dtype == "bf16" else {})
        if whole is not None:
            named = module.named_parameters(remove_duplicate=False)
            self.weight_shares = {name: self._by_parameter[parameter] for name, parameter in named}
            _refuse_unknown(module, self.weight_shares)

    @property
    def is_sharded(self) -> bool:
        """True if this replica has a part of its weights, and :meth:`gather` gets the others."""
        return bool(self.weight_shares)

    def gather(self) -> None:
        """Have all of the weights, until another layer has; collective over replicas that share them."""
        if self._whole is not None:
            self._whole.of(self._by_parameter)

    def kept(self, name: str) -> nn.Parameter | None:
        """Holder of a parameter's values between two steps: itself, or this replica's share, if any."""
        return self.weight_shares[name].own if self.is_sharded else self.module.get_parameter(name)

    def taken(self, value: Tree) -> Tree:
        """A value as the module takes it: the model's inputs in the type of its weights."""
        return inputs_in_bf16(value) if self.index == 0 and self.config.dtype == "bf16" else value

    def learnt(self, name: str) -> nn.Parameter | None:
        """Holder of a parameter's gradient after a step: itself, or this replica's share, if any."""
        return self.shares[name].own if name in self.shares else self.module.get_parameter(name)

    def _updated(self, name: str) -> nn.Parameter | None:
        """Tensor that the optimizer updates for a parameter: its master, or what has its gradient."""
        return self._masters[name] if name in self._masters else self.learnt(name)

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients by parameter, after a step: whole ones, or those of its shares."""
        # Looked up by name only where shares stand for them: this runs twice in each step.
        learnt = ((n, self.learnt(n) if self.shares else p) for n, p in self.module.named_parameters())
        return {name: p.grad for name, p in learnt if p is not None and p.grad is not None}

    def drop_gradients(self) -> None:
        """Forget the gradients of all its parameters, also of those that its optimizer leaves out."""
        self.module.zero_grad(set_to_none=True)
        for name in self.shares:
            learnt = self.learnt(name)
            if learnt is not None:
                learnt.grad = None

    @property
    def arrives(self) -> bool:
        """True if its optimizer's state may still be on its way from another rank."""
        return self._arrival is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Its optimizer; waits for the state that is still on its way from another rank."""
        if self._arrival is not None:
            self._arrival()
            self._arrival = None
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._arrival, self._optimizer = None, optimizer

    def optimizer_tensor(self, name: str) -> torch.Tensor:
        """The one that has this name in :meth:`state`; it does not wait for its values."""
        parameter, key = _parameter_and_key(name)
        held = self._updated(parameter)
        assert held is not None and self._optimizer is not None, "only its state is sent"
        found: torch.Tensor = held.detach() if key == MASTER else self._optimizer.state[held][key]
        return found

    def handed_to_masters(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Give the masters the gradients of what is rounded from them; both, where there were any."""
        rounded, masters = [], []
        for name, master in self._masters.items():
            learnt = self.learnt(name)
            if learnt is not None and learnt.grad is not None:
                master.grad, learnt.grad = learnt.grad.to(master.dtype), None
                rounded.append(learnt.detach())
                masters.append(master.detach())
        return rounded, masters

    def _new_optimizer(self, values: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer | None:
        """A new one; ``values``: in fp32, by parameter, from which masters begin."""
        parameters, self._masters = dict(self.module.named_parameters()), {}
        owned = [p for name, p in parameters.items() if name not in self.copies]
        if self._replicas is not None and parameters:
            with own_parts_in_place(self._by_parameter):
                optimizer = self._shared_optimizer(parameters, self._replicas)
        if not owned:
            return None
        if self._replicas is None:
            optimizer = _make_optimizer(owned, self.config)
            if self.of_experts:
                _refuse_mixing([p for p in owned if p.requires_grad], self.config)
        instead = {}
        for name in values if self.config.has_masters else ():
            learnt = self.learnt(name)
            if learnt is None or not parameters[name].requires_grad or name in self.copies:
                continue
            value = self.shares[name].own_part(values[name]) if name in self.shares else values[name]
            instead[learnt] = nn.Parameter(laid_out_as(learnt, value, torch.float32))
            self._masters[name] = instead[learnt]
        update_instead(
            optimizer, instead, lambda old, value: value.float() if value.dtype is old.dtype else value
        )
        self._kept_elsewhere = kept_elsewhere(optimizer)
        return optimizer

    def _shared_optimizer(self, parameters: Mapping[str, nn.Parameter], axis: Axis) -> torch.optim.Optimizer:
        """One that updates this replica's shares."""
        every = list(parameters.values())
        optimizer = _make_optimizer(every, self.config)
        # Those that it leaves out, it may not take alone.
        taken = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if taken:
            _refuse_mixing(taken, self.config)
        parameters = {name: one for name, one in parameters.items() if name not in self.of_experts}
        shares = shares_of(parameters, optimizer, axis, layer=self.index, tied=self.tied)
        by_parameter = {parameter: shares[name] for name, parameter in parameters.items()}
        if self._whole is not None:
            # Made once: modules and masters have hold of them.
            self._by_parameter = by_parameter = self._by_parameter or self._whole.cut(by_parameter)
        self.shares = {name: by_parameter[parameter] for name, parameter in parameters.items()}
        take_part(optimizer, by_parameter, [parameters[name] for name in self.copies])
        return optimizer

    def _load_shares(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the module's tensors, of its parameters this replica's parts.

        Raises:
            RuntimeError: as of ``load_state_dict``.
        """
        assert self._whole is not None
        self._whole.release()
        rest = {name: value for name, value in tensors.items() if name not in self.weight_shares}
        missing, unexpected = self.module.load_state_dict(rest, strict=False)
        parts = {
            name: share.own.detach() for name, share in self.weight_shares.items() if share.own is not None
        }
        absent = sorted({*missing, *parts}.difference(tensors, self.weight_shares.keys() - parts.keys()))
        if absent or unexpected:
            raise RuntimeError(f"missing tensors: {absent}, unexpected ones: {sorted(unexpected)}")
        for name, part in parts.items():
            if part.shape != tensors[name].shape:
                raise RuntimeError(f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(part.shape)}")
            part.copy_(tensors[name])

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of the layer; module tensors are the live ones, not copies.

        Raises:
            TrainerError: the optimizer keeps state that cannot travel.
        """
        tensors = {
            MODULE + name: value
            for name, value in self.module.state_dict().items()
            if name not in self.weight_shares
        }
        parts = ((name, share.own) for name, share in self.weight_shares.items())
        tensors |= {MODULE + name: own.detach() for name, own in parts if own is not None}
        if self.optimizer is not None:
            refuse_other_state(self.optimizer, self._kept_elsewhere)
            for name, _ in self.module.named_parameters():
                held = self._updated(name)
                kept = {} if held is None else self.optimizer.state.get(held, {})
                kept = as_tensors(self.optimizer, kept)
                if name in self._masters:
                    kept[MASTER] = self._masters[name].detach()
                tensors |= {f"{OPTIMIZER}{name}.{key}": value for key, value in kept.items()}
        return tensors

    def moving_state(self, *, written: bool = False) -> dict[str, torch.Tensor]:
        """All tensors of the layer, and its buffers that are not persistent, which a forward may change.

        ``written``: of these those alone that one does change, as the last trial of a plan has seen.

        Raises:
            TrainerError: the optimizer keeps state that cannot travel.
        """
        unsaved = {
            f"{_UNSAVED}{path}.{name}": part._buffers[name]
            for path, part in self.module.named_modules()
            if not written or part in self.stateful
            for name in part._non_persistent_buffers_set
        }
        held = {name: value for name, value in unsaved.items() if value is not None}
        return self.state() | {n: value for n, value in held.items() if value.layout is torch.strided}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over the tensors of another rank's layer, or of a checkpoint.

        Raises:
            RuntimeError: names or shapes of the module's tensors differ.
        """
        module = {name.removeprefix(MODULE): v for name, v in tensors.items() if name.startswith(MODULE)}
        for key, value in tensors.items():
            if key.startswith(_UNSAVED):
                path, _, name = key.removeprefix(_UNSAVED).rpartition(".")
                part = self.module.get_submodule(path)
                own = part._buffers.get(name)
                form = value.shape, value.dtype
                if own is not None and (own.shape, own.dtype) == form and own.is_contiguous():
                    # In its memory, which other parts may share.
                    own.data.copy_(value)
                else:
                    # In another shape or type than it was built with: a cache may have grown.
                    like = next(self.module.parameters(), value) if own is None else own
                    part.register_buffer(name, value.to(like.device, copy=True), persistent=False)
        for path, part in self.module.named_modules():
            for name, buffer in part._buffers.items():
                made = module.get(f"{path}.{name}".lstrip("."))
                if made is not None and (buffer is None or not torch.can_cast(made.dtype, buffer.dtype)):
                    # One that the first forward makes, or gives another type than it was built with.
                    device = next(self.module.parameters(), made).device
                    part._buffers[name] = torch.empty_like(made, device=device)
        for shared in shared_experts(self.module).values():
            shared.follow_buffer()
        self.of_experts = names_of_experts(self.module)
        if self.is_sharded:
            self._load_shares(module)
        else:
            self.module.load_state_dict(module)
        # Loading may have replaced parameters: a pruned weight comes as its kept values.
        self._arrival = None
        rounded = [name for name, of in self.module.named_parameters() if of.dtype is torch.bfloat16]
        self._optimizer = self._new_optimizer({name: module[name] for name in rounded if name in module})
        if self._optimizer is None:
            return
        for name, value in tensors.items():
            if name.startswith(OPTIMIZER):
                parameter, key = _parameter_and_key(name)
                held = self._updated(parameter)
                if held is None:
                    continue
                if key == MASTER:
                    if parameter in self._masters and not value.is_meta:
                        held.detach().copy_(value)
                    continue
                of = tensors.get(f"{OPTIMIZER}{parameter}.{MASTER}", module.get(parameter, held)).dtype
                # Not of counts, which have a type of their own: bf16 counts to 256.
                of_values = value.dim() > 0 or (held.dim() == 0 and key != "step")
                if value.dtype is of is not held.dtype and of_values:
                    # Of a job whose weights had another type.
                    plain, restored = key, laid_out_as(held, value, held.dtype)
                else:
                    plain, restored = from_tensor(self._optimizer, key, value, held)
                self._optimizer.state[held][plain] = restored

    def expect(self, arrival: Callable[[], object]) -> None:
        """Let ``arrival``, which may wait, fill the optimizer's tensors before the first look at them."""
        self._arrival = arrival

    def replace_parameter(self, old: nn.Parameter, new: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """Let the optimizer continue with ``new`` in place of ``old``, which may be the same.

        Args:
            old: a parameter of the layer.
            new: the parameter that has taken its place in the module.
            state: entries of the optimizer's state that have changed with it.
        """
        if self.optimizer is None:
            return
        update_instead(self.optimizer, {old: new}, lambda _, value: value)
        if state:
            self.optimizer.state[new] = {**self.optimizer.state.get(new, {}), **state}

    def byte_count(self, *, shares_gradients: bool = False) -> int:
        """Bytes of parameters, gradients and optimizer state; ``shares_gradients``: of its part alone."""
        state = sum(tensor.nbytes for tensor in self.state().values())
        learning = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        learnt = [self.learnt(name) if shares_gradients else p for name, p in learning]
        return state + sum(one.nbytes for one in learnt if one is not None)


@functools.lru_cache(maxsize=64)
def _mixes(config: TrainingConfig, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> bool:
    with host_seeded(0):
        # Small, so that small updates are no rounding of theirs.
        parameters = [nn.Parameter(0.01 * torch.randn(shape).to(device)) for shape in shapes]
    return mixes_parameters(functools.partial(_make_optimizer, config=config), parameters)


def _refuse_mixing(parameters: list[nn.Parameter], config: TrainingConfig) -> None:
    """Refuse an optimizer of the user's that cannot have some of the parameters alone.

    Raises:
        ConfigurationError: it updates a parameter by others' gradients, too.
    """
    if config.optimizer in OWN_OPTIMIZERS:
        return
    shapes = (tuple(p.shape) for p in parameters if p.numel())
    smallest = sorted(shapes, key=lambda shape: (math.prod(shape), shape))[:2]
    if _mixes(config, tuple(smallest), parameters[0].device):
        reason = (
            f"{config.optimizer} updates a parameter by the gradients of others, too, and with "
            "parallelism.zeroStage or experts.parallel a replica has a part of them. To fix: zeroStage: 0 "
            "without parallel, or an optimizer of one parameter at a time"
        )
        raise ConfigurationError("training.optimizer", reason)


def refuse_whole_matrices(config: TrainingConfig) -> None:
    """Refuse an optimizer of the user's that cannot have a part of a matrix.

    Raises:
        ConfigurationError: it updates that otherwise than in the whole matrix, or cannot be made or tried.
    """
    if config.optimizer in OWN_OPTIMIZERS:
        return
    make = functools.partial(_make_optimizer, config=config)
    has_gpu = torch.cuda.is_available()
    try:
        try:
            mixes = mixes_numbers(make, torch.device("cpu"))
        except Exception:
            # Some step on a GPU alone.
            if not has_gpu:
                raise
            mixes = mixes_numbers(make, torch.device("cuda"))
    except (ConfigurationError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's optimizer may raise anything
        tried = "it is tried whether it can have parts of a matrix, as with parallelism.tensor"
        if not has_gpu and _OF_DEVICES.search(f"{type(error).__name__}: {error}"):
            reason = (
                f"{config.optimizer} does not step on a CPU ({with_place(error)}); no GPU is here on which "
                f"{tried}. To fix: start on a GPU, tensor: 1, or an optimizer such as adamw"
            )
        else:
            reason = (
                f"{config.optimizer} ends with an error of its own where {tried}: {with_place(error)}. "
                "To fix: an optimizer that steps by gradients alone, which have no graph, such as adamw"
            )
        raise ConfigurationError("training.optimizer", reason) from error
    if mixes:
        reason = (
            f"{config.optimizer} updates a number by others of its whole matrix or vector, of which with "
            "parallelism.tensor or experts.parallel a rank has a part. To fix: tensor: 1 without parallel, "
            "or an optimizer such as adamw"
        )
        raise ConfigurationError("training.optimizer", reason)


def _refuse_unknown(module: nn.Module, known: Collection[str]) -> None:
    """Refuse a module whose state renames parameters: they could not be shared. Raises ConfigurationError."""
    empty = {parameter.data_ptr() for parameter in module.parameters()} | {0}
    unknown = [
        name
        for name, value in module.state_dict().items()
        if name not in known and value.numel() and value.data_ptr() in empty
    ]
    if unknown:
        reason = (
            f"{type(module).__name__} saves {', '.join(unknown)} under another name than its parameter's. "
            "To fix: zeroStage: 2"
        )
        raise ConfigurationError("parallelism.zeroStage", reason)


def _refuse_module(index: int, module: nn.Module) -> None:
    """Refuse a module that saves what is no tensor (``get_extra_state``), or waits for all ranks of a job.

    Raises:
        ConfigurationError: it does.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            reason = (
                f"layer {index} ({type(module).__name__}) has a SyncBatchNorm at {name!r}, "
                "whose forward waits for all ranks, and stages and replicas run theirs at other times. "
                "To fix: nn.BatchNorm1d, 2d or 3d, whose running statistics are those of one process"
            )
            raise ConfigurationError("model.name", reason)
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            reason = (
                f"layer {index} ({type(module).__name__}) saves {name!r} as {type(value).__name__}, and "
                "tensors alone move between ranks. To fix: register it as a buffer, or return a tensor"
            )
            raise ConfigurationError("model.name", reason)


def _parameter_and_key(name: str) -> tuple[str, str]:
    """Parameter and key of a tensor of the optimizer, by its name in :meth:`Layer.state`."""
    parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
    return parameter, key


class LayerSet:
    """The layers that this rank holds, by index.

    Attributes:
        device: where they live.
        seed: of their initial weights and of dropout.
        shared_buffers: of the whole model, as :class:`Model` has them.
        under_way: wait until messages with state of layers that moved have been sent or received.
    """

    def __init__(
        self,
        model: Model,
        config: TrainingConfig,
        device: torch.device,
        prepare: Callable[[int, nn.Module], nn.Module],
        *,
        replicas: Axis | None = None,
        shards_weights: bool = False,
    ) -> None:
        """Hold nothing yet.

        Args:
            model: whose layers.
            config: seed and optimizer.
            device: where they live.
            prepare: makes a newly built layer able to change.
            replicas: the ranks over which each layer's optimizer is shared (ZeRO-1); None: it is whole.
            shards_weights: they share its weights, too (ZeRO-3).
        """
        self._model = model
        self.shared_buffers = model.shared_buffers
        self._replicas = replicas
        self._whole = WholeWeights(replicas) if replicas is not None and shards_weights else None
        self._config = config
        self.device = device
        self.seed = config.seed
        self._prepare = prepare
        self._held: dict[int, Layer] = {}
        self.under_way: list[Callable[[], object]] = []

    @property
    def config(self) -> TrainingConfig:
        """Their optimizer, and which of them repeat their forward: that may change between two steps."""
        return self._config

    @config.setter
    def config(self, config: TrainingConfig) -> None:
        self._config = config
        for layer in self:
            layer.config = config

    def __iter__(self) -> Iterator[Layer]:
        return iter([self._held[index] for index in sorted(self._held)])

    def __getitem__(self, index: int) -> Layer:
        return self._held[index]

    def indices(self) -> tuple[int, ...]:
        """Indices of the layers held, ascending."""
        return tuple(sorted(self._held))

    def make(self, index: int) -> Layer:
        """Build layer ``index`` with its initial weights, without holding it.

        Raises:
            ConfigurationError: it has state that cannot travel, or waits for all ranks.
        """
        now: dict[int, str] = {}

        def build() -> nn.Module:
            module = self._model.build_layer(index)
            tied = {
                number: module.get_parameter(name)
                for number, tie in enumerate(self._model.tied)
                for layer, name in tie
                if layer == index
            }
            module = self._prepare(index, module)
            _refuse_module(index, module)
            for part in module.modules():
                if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                    # Norms and sums over ranks are of dense gradients, whose update is the same.
                    part.sparse = False
            # A change of the model may have wrapped what has them.
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            now.update({number: names[id(parameter)] for number, parameter in tied.items()})
            return module.to(self.device)

        with host_seeded():
            seed_build(seed=self.seed, layer=index)
            module = build_to_follow(build)
        if self._config.compile:
            compile_layer(module)
        copies = [name for number, name in now.items() if self._model.tied[number][0][0] != index]
        return Layer(
            index, module, self._config, tied=now, copies=copies, replicas=self._replicas, whole=self._whole
        )

    def hold(self, layers: Iterable[Layer]) -> None:
        """Hold these layers too."""
        self._held.update({layer.index: layer for layer in layers})

    def settle(self) -> None:
        """Wait for the optimizer state that is on its way from this rank and to it."""
        for layer in self:
            _ = layer.optimizer
        while self.under_way:
            self.under_way.pop()()

    def drop(self, indices: Iterable[int]) -> None:
        """Release layers."""
        self.release_weights()
        for index in indices:
            del self._held[index]

    def release_weights(self) -> None:
        """Let go of weights that other replicas have, too (ZeRO-3): before an update, and after it."""
        if self._whole is not None:
            self._whole.release()

    def parameters(self) -> list[nn.Parameter]:
        """All parameters held."""
        return [parameter for layer in self for parameter in layer.module.parameters()]
