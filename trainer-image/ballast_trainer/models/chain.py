"""A module whose forward runs a list of layers, taken apart: what comes before, the layers, what follows.

Each part runs the module's own forward with stand-ins for what other parts have: layers get the masks,
rotations and scales that the whole module makes for them, whatever its family does.  What a layer gets
beside its hidden states must depend on their shape alone, or be what an encoder or the layer before returned.
"""

import contextlib
import copy
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ballast_trainer.trees import Tree, mapped

_MOST_KEPT = 4
"""Shapes of hidden states whose masks and rotations a process keeps."""


class Packed(NamedTuple):
    """Hidden states of rows of samples, one after the other, and each token's place in its sample [B, S]."""

    hidden: torch.Tensor
    positions: torch.Tensor


class Handed(NamedTuple):
    """Hidden states, and what else the layers of an encoder and its decoder hand on.

    Attributes:
        hidden: of the encoder, then of the decoder.
        results: further tensors that the layer before returned, e.g. T5's position bias.
        beside: of an encoder the decoder's tokens, of a decoder what the encoder returned.
    """

    hidden: torch.Tensor
    results: tuple[torch.Tensor, ...]
    beside: torch.Tensor

    def filled(self, call: "Call") -> "Call":
        """The call of the next layer, with these tensors in their places."""

        def fill(one: Any) -> Any:
            if isinstance(one, _Result):
                return self.results[one.place]
            return self.beside if one is _MEMORY else one

        return tuple(map(fill, call[0])), {name: fill(one) for name, one in call[1].items()}


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a layer beside hidden states."""


class _Result(NamedTuple):
    """Mark in a call: which tensor it is of those that a layer returned beside hidden states."""

    layer: int
    place: int


_MEMORY = object()
"""Mark in a call: what the encoder returned."""


class NoChainError(Exception):
    """The module is not a list of layers that run one after the other."""


class _Reached(BaseException):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Shared:
    """State that the stand-ins of one part share.

    Attributes:
        hidden: the hidden states that the part is given.
        calls: by layer, what it was called with beside hidden states.
        end: number of the layer at which the forward ends; None: it runs through.
    """

    def __init__(self, end: int | None = None) -> None:
        self.hidden: torch.Tensor | None = None
        self.calls: dict[int, Call] = {}
        self.end = end


class _StandIn(nn.Module):
    """Stand-in for a layer."""

    def __init__(
        self, layer: nn.Module, index: int, results: tuple[Any, ...] | None, shared: _Shared
    ) -> None:
        super().__init__()
        _describe(self, layer)
        self._index, self._results, self._shared = index, results, shared

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call; hand on the hidden states of the part."""
        shared = self._shared
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        shared.calls[self._index] = tuple(others), kwargs
        if self._index == shared.end:
            raise _Reached(hidden)
        return shared.hidden if self._results is None else (shared.hidden, *self._results)


def _describe(stand_in: nn.Module, module: nn.Module) -> None:
    """Give it the plain attributes of the module, which models look at."""
    for name, value in vars(module).items():
        if isinstance(value, str | int | float | tuple | None) and not name.startswith("_"):
            setattr(stand_in, name, value)


class _Absent(nn.Module):
    """Stand-in for a module that another part has: zeros in the form of what it returned on trial."""

    def __init__(self, module: nn.Module, form: Tree, tried: torch.Tensor, shared: _Shared) -> None:
        super().__init__()
        _describe(self, module)
        self._form, self._tried, self._shared = form, tried.shape[:2], shared
        for name, part in module.named_children():
            # Models look at the types of their parts.
            setattr(self, name, _Absent(part, form, tried, shared))

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the type and on the device of the hidden states."""
        assert self._shared.hidden is not None
        return self._shared.hidden.new_zeros(())

    def forward(self, *args: Any, **kwargs: Any) -> Tree:
        """Zeros; computed from the hidden states, so that what follows from them is seen to."""
        hidden = self._shared.hidden
        assert hidden is not None

        def zeros(like: torch.Tensor) -> torch.Tensor:
            # Samples and positions; positions alone, e.g. of their embedding.
            now = dict(zip(self._tried, hidden.shape, strict=False))
            shape = [now.get(size, size) for size in like.shape[:2]] + list(like.shape[2:])
            made = torch.zeros(shape, dtype=like.dtype, device=hidden.device)
            return made + hidden.flatten()[:1].sum() * 0 if like.is_floating_point() else made

        return mapped(zeros, self._form)


class Chain:
    """Calls of a module on the layers of its list at ``path``, found by running it once."""

    def __init__(
        self,
        module: nn.Module,
        inputs: torch.Tensor,
        options: Mapping[str, Any],
        *,
        hands_on: bool = False,
    ) -> None:
        """Run the module once, in evaluation mode.

        Args:
            module: whose forward takes ``inputs`` first.
            inputs: of a few samples.
            options: further arguments of its forward.
            hands_on: a layer may take what the one before it returned beside hidden states.

        Raises:
            NoChainError: it has no list of layers that run one after the other, or several.
        """
        self._module, self._options = module, dict(options)
        order: list[nn.Module] = []
        results: dict[int, Any] = {}
        given: dict[int, Any] = {}

        def before(part: nn.Module, args: Any, kwargs: Any) -> None:
            order.append(part)
            given.setdefault(id(part), args[0] if args else kwargs.get("hidden_states"))

        def after(part: nn.Module, args: Any, output: Any) -> None:
            results.setdefault(id(part), output)

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for part in module.modules():
                for handle in (
                    part.register_forward_pre_hook(before, with_kwargs=True),
                    part.register_forward_hook(after),
                ):
                    hooks.callback(handle.remove)
            self.output = module(inputs, **self._options)
        calls = [id(part) for part in order]
        self.path = _layers_path(module, calls)
        self.layers = list(module.get_submodule(self.path).children())
        self.tried = given[id(self.layers[0])]
        self._results, self._calls, self._inputs = results, calls, inputs
        outputs = [results[id(layer)] for layer in self.layers]
        self._forms = [
            _marks(index, output, hands_on) if isinstance(output, tuple) else None
            for index, output in enumerate(outputs)
        ]
        firsts = [output[0] if isinstance(output, tuple) else output for output in outputs]
        if not all(isinstance(one, torch.Tensor) for one in (self.tried, *firsts)) or self.tried.dim() < 2:
            raise NoChainError(f"{self.path} hand on something else than one tensor of hidden states")
        self._first, self._last = (calls.index(id(self.layers[at])) for at in (0, -1))

    def first(self) -> nn.Module:
        """Part before the layers: inputs to hidden states."""
        shared = _Shared(end=0)
        kept = self._copy(self._module, "", shared, lambda part: self._when(part) != "after")
        return BeforeLayers(kept, shared, self._options)

    def last(self) -> nn.Module:
        """Part after the layers: hidden states to outputs."""
        shared = _Shared()
        kept = self._copy(self._module, "", shared, lambda part: self._when(part) != "before")
        return AfterLayers(kept, shared, self._options, self._inputs)

    def calls(self, memory: torch.Tensor | None = None) -> "LayerCalls":
        """Arguments of the layers beside hidden states; ``memory``: what an encoder has returned."""
        shared = _Shared(end=len(self.layers) - 1)
        kept = self._copy(self._module, "", shared, lambda part: next(part.parameters(), None) is None)
        # Apart from the module, whose mode changes.
        kept, shared = copy.deepcopy((kept, shared))
        found = LayerCalls(kept.eval(), shared, self._options, self._inputs, self.tried.shape)
        hidden = torch.zeros_like(self.tried, requires_grad=self.tried.is_floating_point())
        given = {} if memory is None else {"memory": memory.detach().clone().requires_grad_()}
        for index, (args, kwargs) in enumerate(found.made_for(hidden, **given)):
            for name, value in (*enumerate(args, start=1), *kwargs.items()):
                tensors = [one for one in tree_leaves(value) if torch.is_tensor(one)]
                plain = isinstance(value, torch.Tensor | tuple | list | dict | str | int | float | None)
                plain = value.layer == index - 1 if isinstance(value, _Result) else plain or value is _MEMORY
                if not plain or any(one.requires_grad for one in tensors):
                    what = "depends on hidden states" if plain else f"is a {type(value).__name__}"
                    raise NoChainError(f"layer {index} of {self.path} takes {name!r}, which {what}")
        return found

    def _when(self, part: nn.Module) -> str:
        """Place of a module: ``before`` or ``after`` the layers, or ``both``; ``after`` if never called."""
        at = [place for place, called in enumerate(self._calls) if called == id(part)]
        if at and at[0] < self._first:
            return "both" if at[-1] > self._last else "before"
        return "after"

    def _copy(
        self, module: nn.Module, path: str, shared: _Shared, keeps: Callable[[nn.Module], bool]
    ) -> nn.Module:
        """The module with stand-ins for its layers, and for those of its parts that are not kept."""
        if path == self.path:
            made = zip(self.layers, self._forms, strict=True)
            return nn.ModuleList(_StandIn(layer, i, form, shared) for i, (layer, form) in enumerate(made))
        around = not path or self.path.startswith(f"{path}.")
        if not around and (
            id(module) in self._results or not isinstance(module, nn.ModuleList | nn.ModuleDict)
        ):
            if keeps(module):
                return module
            return _Absent(module, self._results.get(id(module), self.tried), self.tried, shared)
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if around and own:
            raise NoChainError(f"{type(module).__name__} uses {own[0]!r} around its layers")
        copied = copy.copy(module)
        if hasattr(module, "config"):
            # As it is now, whatever becomes of that of the module.
            copied.__dict__["config"] = copy.copy(module.config)
        # Hooks may be methods of the whole module.
        copied.__dict__["_load_state_dict_pre_hooks"] = OrderedDict()
        copied.__dict__["_modules"] = {
            name: None if part is None else self._copy(part, f"{path}.{name}".lstrip("."), shared, keeps)
            for name, part in module._modules.items()
        }
        return copied


class BeforeLayers(nn.Module):
    """A module up to its first layer."""

    def __init__(self, model: nn.Module, shared: _Shared, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._shared, self._options = shared, options

    def forward(self, inputs: torch.Tensor | Mapping[str, torch.Tensor]) -> torch.Tensor | Packed:
        """Inputs of the module, or packed tokens and positions -> hidden states of its first layer."""
        try:
            if isinstance(inputs, torch.Tensor):
                self.model(inputs, **self._options)
            else:
                self.model(inputs["input_ids"], position_ids=inputs["position_ids"], **self._options)
        except _Reached as reached:
            hidden: torch.Tensor = reached.value
            self._shared.calls.clear()
            return hidden if isinstance(inputs, torch.Tensor) else Packed(hidden, inputs["position_ids"])
        raise RuntimeError("the module has not called its layers, as it did when it was tried")


class AfterLayers(nn.Module):
    """A module from behind its last layer."""

    def __init__(
        self, model: nn.Module, shared: _Shared, options: Mapping[str, Any], inputs: torch.Tensor
    ) -> None:
        super().__init__()
        self.model = model
        self._shared, self._options, self._like = (
            shared,
            options,
            inputs.new_zeros(inputs.shape, device="meta"),
        )

    def forward(self, value: torch.Tensor | Packed) -> torch.Tensor:
        """Hidden states of the last layer -> logits, or of an encoder what it returns."""
        hidden = value.hidden if isinstance(value, Packed) else value
        self._shared.hidden = hidden
        try:
            output = self.model(_inputs_like(self._like, hidden), **self._options)
        finally:
            self._shared.hidden = None
        returned: torch.Tensor = getattr(output, "logits", getattr(output, "last_hidden_state", output))
        return returned


class LayerCalls:
    """Arguments of the layers beside hidden states; shared by all layers of a process, and no part of any.

    Attributes:
        tried: shape of the hidden states that the module was tried with.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: _Shared,
        options: Mapping[str, Any],
        inputs: torch.Tensor,
        tried: torch.Size,
    ) -> None:
        self.tried = tried
        self._models: dict[torch.device, tuple[nn.Module, _Shared]] = {inputs.device: (model, shared)}
        self._options, self._like = options, inputs.new_zeros(inputs.shape, device="meta")
        self._kept: dict[Any, list[Call]] = {}
        self._packed: tuple[torch.Tensor | None, Any, Any] = (None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerCalls":
        """Itself: it has no state of training."""
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(self, index: int, hidden: torch.Tensor, memory: torch.Tensor | None = None) -> Call:
        """The call of layer ``index`` for hidden states, and what the encoder returned, of this form."""
        key = _form_of(hidden), None if memory is None else memory.shape
        if key not in self._kept:
            while len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            with torch.no_grad():
                given = {} if memory is None else {"memory": memory.detach()}
                self._kept[key] = self.made_for(hidden.detach(), **given)
        return self._kept[key][index]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of_packed(self, index: int, value: Packed) -> tuple[Call, torch.Tensor]:
        """Call by :meth:`of` for packed samples, and the positions by which the next layer finds it again."""
        positions, key, calls = self._packed
        hidden = value.hidden
        if value.positions is not positions or key != _form_of(hidden):
            # A copy that nothing else changes, as the room is that messages are received in.
            positions, key = value.positions.clone(), _form_of(hidden)
            with torch.no_grad():
                # On meta, values are not known, and do not count.
                given = {} if hidden.is_meta else {"position_ids": positions}
                calls = self.made_for(hidden.detach(), **given)
            self._packed = positions, key, calls
        assert positions is not None
        return calls[index], positions

    def made_for(self, hidden: torch.Tensor, **options: Any) -> list[Call]:
        """Calls of the whole module by layer, for ``hidden`` and further arguments ``options``."""
        if hidden.is_meta:
            # Masks follow from values: those of positions do not count, and of an encoder's its form.
            on_host = functools.partial(torch.zeros_like, device="cpu")
            given = {name: on_host(one) for name, one in options.items() if name == "memory"}
            found = self.made_for(on_host(hidden), **given)
            to_meta = functools.partial(torch.Tensor.to, device="meta")
            return [tree_map_only(torch.Tensor, to_meta, call) for call in found]
        if hidden.device not in self._models:
            model, shared = copy.deepcopy(next(iter(self._models.values())))
            self._models[hidden.device] = model.to(hidden.device), shared
        model, shared = self._models[hidden.device]
        shared.hidden, shared.calls = hidden, {}
        try:
            model(_inputs_like(self._like, hidden), **self._options, **options)
        except _Reached:
            pass
        finally:
            calls, shared.hidden, shared.calls = shared.calls, None, {}
        memory = options.get("memory", calls)
        marked = functools.partial(tree_map_only, torch.Tensor, lambda one: _MEMORY if one is memory else one)
        return [marked(calls[index]) for index in sorted(calls)]


def _marks(index: int, output: tuple[Any, ...], hands_on: bool) -> tuple[Any, ...]:
    """Marks in the place of what layer ``index`` returned beside hidden states."""
    if not hands_on:
        return (None,) * (len(output) - 1)
    places = itertools.count()
    return tuple(_Result(index, next(places)) if torch.is_tensor(one) else None for one in output[1:])


def _form_of(hidden: torch.Tensor) -> Any:
    """All of hidden states that what layers get beside them depends on."""
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind) if kind != "meta" else False
    return hidden.shape, hidden.dtype, hidden.device, autocast


def _inputs_like(tried: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of a module's inputs: tokens have the shape of hidden states, images their own."""
    tokens = tried.dim() == 2 and not tried.is_floating_point()
    shape = hidden.shape[:2] if tokens else (hidden.shape[0], *tried.shape[1:])
    return torch.zeros(shape, dtype=tried.dtype, device=hidden.device)


def _layers_path(module: nn.Module, calls: list[int]) -> str:
    """Path of the outermost list whose modules are all called once, in order."""
    found: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in found):
            continue
        ids = [id(layer) for layer in part]
        if ids and [call for call in calls if call in set(ids)] == ids:
            found.append(path)
    if len(found) != 1:
        what = f"several lists of layers ({', '.join(found)})" if found else "no list of layers"
        raise NoChainError(f"it has {what} of which each is called once, one after the other")
    return found[0]
