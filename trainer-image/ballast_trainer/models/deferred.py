"""Deferred weights: modules without memory for their parameters, which are computed when a layer is built.

While a function of the user's builds a model, each large parameter that a module registers goes to the device
meta, and what has made its value is noted: operations, with the state of the random generator, and reads of
files.  A layer's parameters are then computed alone, bit for bit as if the whole model had been built.  As
torchdistx's ``deferred_init``, and accelerate's ``init_empty_weights``; but an operation that reads a
parameter, e.g. in a forward on trial, finds its value, which is computed for it.

Values of another origin (numpy, other libraries' loaders) cannot be computed again, and stay in memory.
"""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import gc
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ballast_trainer.seeding import host_seeded

SMALLEST_BYTES = 64 << 10
"""Parameters below stay as they are."""
_KEPT_BYTES = 16 << 20
"""Bytes of values that operations have read last."""
_OVERWRITING = frozenset(
    f"aten::{name}_" for name in ("normal", "uniform", "zero", "fill", "copy", "random", "exponential")
)
_COPYING = frozenset(("aten::clone", "aten::_to_copy"))
_TO_A_DEVICE = frozenset(("aten::_to_copy", "aten::scalar_tensor"))
_FROM_OUTSIDE = frozenset(
    ("numpy", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__array__", "__dlpack__")
)
_UNDISPATCHED = _FROM_OUTSIDE | {"tolist", "tensor", "as_tensor", "asarray", "__deepcopy__", "__reduce_ex__"}
"""Functions that read a tensor in memory without an operation that a mode sees."""
_BY_SHAPE_ALONE = frozenset(
    f"aten::{name}" for like in ("empty", "zeros", "ones", "full") for name in (f"{like}_like", f"new_{like}")
)


_PLACES = {
    torch.Tensor.device: torch.device("cpu"),
    torch.Tensor.is_cpu: True,
    torch.Tensor.is_meta: False,
}
"""Properties that say where a tensor is."""


class CannotDeferError(Exception):
    """The model has to be built as a whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """A tensor in a memory whose value can be computed again."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype, device="cpu")
        return made.set_(storage, self.offset, self.size, self.stride)


@dataclasses.dataclass(frozen=True, slots=True)
class _GeneratorState:
    """State of a generator of the user's, before an operation."""

    state: torch.Tensor

    def generator(self) -> torch.Generator:
        made = torch.Generator()
        made.set_state(self.state)
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class _Operation:
    """Operation that has written to memories.

    Attributes:
        number: in the order of all operations.
        run: the operation.
        leaves, form: its arguments, tensors as views.
        made: by new memory, which of the outputs has it.
        state: of torch's generator before; None: it draws no numbers.
        overwrites: whether nothing is left of what the memory had before.
    """

    number: int
    run: Callable[..., Any]
    leaves: tuple[Any, ...] = ()
    form: Any = dataclasses.field(default_factory=lambda: tree_flatten(((), {}))[1])
    made: dict[int, int] = dataclasses.field(default_factory=dict)
    state: torch.Tensor | None = None
    overwrites: bool = False

    def reads(self) -> set[int]:
        """The memories of its arguments."""
        return {leaf.memory for leaf in self.leaves if isinstance(leaf, _View)}


_BUILDING: contextvars.ContextVar["DeferredWeights | None"] = contextvars.ContextVar("weights", default=None)


_FOLLOW: contextvars.ContextVar[bool] = contextvars.ContextVar("follow", default=False)


@contextlib.contextmanager
def values_follow() -> Iterator[None]:
    """Build layers with memory for their parameters and no values, which come from another rank."""
    before = _FOLLOW.set(True)
    try:
        yield
    finally:
        _FOLLOW.reset(before)


def build_to_follow(build: Callable[[], nn.Module]) -> nn.Module:
    """Module that ``build`` makes from the generators as they are; where values follow, maybe without them.

    Operations in place on parameters that modules have registered, e.g. of ``torch.nn.init``, are then left
    out.  Where anything but the values of its parameters could differ by that, since something else draws
    numbers or reads a parameter, ``build`` runs again with all operations.
    """
    if _FOLLOW.get():
        unwritten = _Unwritten()
        # What is wrong with it, the second build says.
        with contextlib.suppress(Exception), host_seeded():
            before = torch.default_generator.get_state()
            with unwritten.building():
                module = build()
            if torch.equal(torch.default_generator.get_state(), before) and unwritten.all_come(module):
                return module
    return build()


def deferred_weights() -> "DeferredWeights | None":
    """Weights of the model that is being built; None: they are not deferred."""
    return _BUILDING.get()


def address_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's data; the same of two tensors only where they are the same."""
    view = None if (weights := _BUILDING.get()) is None else weights.view_of(tensor)
    if view is not None:
        return -1 - (view.memory << 48) - view.offset
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr()


class DeferredWeights(TorchDispatchMode):
    """The parameters of modules that are made in :meth:`building`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._smallest = SMALLEST_BYTES
        self._threads = torch.get_num_threads()
        self._count = self._released = 0
        # By address; the references keep addresses from being given again.
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._origin: dict[int, StorageWeakRef] = {}
        self._bytes: dict[int, int] = {}
        self._writers: dict[int, list[_Operation]] = {}
        self._deferred: set[int] = set()
        # By memory, after the newest write that was seen.
        self._versions: dict[int, int] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._copied = False
        self._values: OrderedDict[int, torch.UntypedStorage] = OrderedDict()
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._others: list[weakref.ref[torch.Tensor]] = []

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Defer the weights of what is made meanwhile."""
        with contextlib.ExitStack() as stack:
            for handle in (
                register_module_parameter_registration_hook(self._parameter_registered),
                register_module_module_registration_hook(self._module_registered),
            ):
                stack.callback(handle.remove)
            stack.callback(_BUILDING.reset, _BUILDING.set(self))
            stack.enter_context(_AsOnTheHost(self))
            stack.enter_context(self)
            yield

    def keep(self, layers: Iterable[nn.Module]) -> int:
        """Defer what these modules have, and give all others that were made their values.

        Returns:
            Bytes of the modules' large parameters that stay in memory.

        Raises:
            CannotDeferError: some tensor would be left without its value.
        """
        parts = {id(part): part for layer in layers for part in layer.modules()}
        kept: dict[int, torch.Tensor] = {}
        for part in parts.values():
            for parameter in part._parameters.values():
                self._defer(parameter)
            held = (*part._parameters.values(), *part._buffers.values())
            kept |= {id(one): one for one in held if one is not None}
        if any(one.is_meta and self.view_of(one) is None for one in kept.values()):
            raise CannotDeferError("a layer has a tensor on the device meta")
        views = [(one, self.view_of(one)) for one in kept.values()]
        if any(view is not None and self._was_written(one, view) for one, view in views):
            raise CannotDeferError("another thread has written to a parameter")
        for reference in self._modules.values():
            other = reference()
            for one in () if other is None else (*other._parameters.values(), *other._buffers.values()):
                if one is not None and id(one) not in kept:
                    self._give_value(one)
        others = [one for reference in self._others if (one := reference()) is not None]
        self._others.clear()
        if self._copied:
            # Parameters of a copied module, e.g. a teacher, were not registered.
            others += [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        for one in others:
            if id(one) not in kept:
                self._give_value(one)
        memories = {view.memory for one in kept.values() if (view := self.view_of(one)) is not None}
        self._forget_all_but(memories)
        real = [one.nbytes for one in kept.values() if not one.is_meta and one.nbytes >= self._smallest]
        return sum(real) + sum(storage.nbytes() for storage in self._kept.values())

    def view_of(self, tensor: torch.Tensor) -> _View | None:
        """View of a deferred tensor; None: it has its value."""
        with torch._C.DisableTorchFunction():
            return self._view(tensor) if tensor.is_meta else None

    def either_deferred(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True if some of them are."""
        return any(self.view_of(one) is not None for one in tensors)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a deferred tensor, in memory of its own."""
        view = self.view_of(tensor)
        assert view is not None
        return view.on(self._compute(view.memory, self._count))

    def fill(self, layer: nn.Module, copied: nn.Module) -> None:
        """Give a copy of a layer the values of what is deferred in it."""
        values: dict[int, torch.Tensor] = {}
        for part, made in zip(layer.modules(), copied.modules(), strict=True):
            for held, new in ((part._parameters, made._parameters), (part._buffers, made._buffers)):
                for name, one in held.items():
                    if one is None or self.view_of(one) is None:
                        continue
                    if id(one) not in values:
                        if isinstance(one, nn.Parameter):
                            value = torch.empty_like(one, device="cpu") if _FOLLOW.get() else self.value(one)
                            value = nn.Parameter(value, requires_grad=one.requires_grad)
                        else:
                            value = self.value(one)
                        value.__dict__.update(one.__dict__)
                        values[id(one)] = value
                    new[name] = values[id(one)]  # type: ignore[assignment]

    def read(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Value of ``run``, which it will return again."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            made = run()
            self._add(_Operation(self._next(), run, made={self._note(made): 0}))
        return made

    def replace(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Set the data of a parameter, where one of both is deferred."""
        with _disable_current_modes():
            if isinstance(parameter, nn.Parameter):
                data = nn.Parameter(data, requires_grad=parameter.requires_grad)
            else:
                data = data.detach()
            torch.utils.swap_tensors(parameter, data)
            self._defer(parameter)

    def seen_from_outside(self, tensor: torch.Tensor) -> None:
        """The tensor's memory may be written unseen. Raises CannotDeferError: it is not in memory."""
        view = self._view(tensor)
        if view is None:
            return
        if view.memory in self._deferred:
            raise CannotDeferError("the memory of a parameter is looked at")
        del self._known[StorageWeakRef(tensor.untyped_storage()).cdata]

    def _parameter_registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._modules[id(module)] = weakref.ref(module)
            self._defer(parameter)

    def _module_registered(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        # The parameters of a copied module were not registered.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for one in () if part is None else part.modules():
                self._modules[id(one)] = weakref.ref(one)
                for parameter in one._parameters.values():
                    self._defer(parameter)

    def _defer(self, parameter: Any) -> None:
        """Release a parameter's memory, where its value can be computed again."""
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
            return
        view = self._view(parameter) if parameter.nbytes >= self._smallest else None
        if view is None:
            return
        made = self._on_meta(parameter, view.memory)
        deferred = nn.Parameter(made, requires_grad=parameter.requires_grad)
        deferred.__dict__.update(parameter.__dict__)
        # Not where something else refers to the tensor, e.g. a view of it.
        with contextlib.suppress(RuntimeError):
            torch.utils.swap_tensors(parameter, deferred)
        self._wrote(parameter, view)

    def _on_meta(self, like: torch.Tensor, memory: int) -> torch.Tensor:
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        self._deferred.add(memory)
        reference = StorageWeakRef(made.untyped_storage())
        self._known[reference.cdata] = reference, memory
        return made

    def _give_value(self, tensor: torch.Tensor) -> None:
        view = self.view_of(tensor)
        if view is None:
            return
        value = view.on(self._value(view.memory))
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        value.__dict__.update(tensor.__dict__)
        try:
            torch.utils.swap_tensors(tensor, value)
        except RuntimeError as error:
            raise CannotDeferError(f"a tensor outside of the layers is still used: {error}") from error

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _note(self, tensor: torch.Tensor) -> int:
        """Number a new memory."""
        reference, memory = StorageWeakRef(tensor.untyped_storage()), self._next()
        self._known[reference.cdata] = reference, memory
        self._origin[memory] = reference
        self._bytes[memory] = tensor.untyped_storage().nbytes()
        return memory

    def _is_new(self, tensor: torch.Tensor) -> bool:
        plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
        return plain and self._view(tensor) is None

    def _view(self, tensor: torch.Tensor) -> _View | None:
        """View of a tensor; None: in memory whose value cannot be computed again."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        known = self._known.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        if known is None:
            return None
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return _View(known[1], tensor.dtype, size, stride, int(tensor.storage_offset()))

    def _wrote(self, tensor: torch.Tensor, view: _View, *, more: int = 0) -> None:
        if not tensor.is_inference():
            self._versions[view.memory] = max(tensor._version + more, self._versions.get(view.memory, 0))

    def _was_written(self, tensor: torch.Tensor, view: _View) -> bool:
        """True if there were writes that were not seen: only operations of the builder's own thread are."""
        return not tensor.is_inference() and tensor._version > self._versions.get(view.memory, 0)

    def _add(self, operation: _Operation, changed: Collection[int] = ()) -> None:
        for memory in {*operation.made, *changed}:
            self._writers.setdefault(memory, []).append(operation)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on values, and note what it has written."""
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name in _TO_A_DEVICE and kwargs.get("device") == torch.device("meta"):
            # What torch itself brings to where a deferred tensor seems to be.
            kwargs = kwargs | {"device": torch.get_default_device()}
        leaves, form = tree_flatten((args, kwargs))
        views = {at: self._view(leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        for at, view in views.items():
            if view is not None and not leaves[at].is_meta and self._was_written(leaves[at], view):
                del self._known[StorageWeakRef(leaves[at].untyped_storage()).cdata]
                views[at] = None
        metas = {at: view for at, view in views.items() if view is not None and leaves[at].is_meta}
        if torch.Tag.inplace_view in func.tags and metas:
            return self._set(func, args, views)
        if torch.Tag.inplace_view in func.tags:
            found = func(*args, **kwargs)
            # They may have other sizes now.
            for one in (leaves[at] for at, view in views.items() if view is not None):
                self._known.pop(StorageWeakRef(one.untyped_storage()).cdata, None)
            return found
        written, is_view, draws = _facts(func)
        targets = [
            one
            for at, name in written
            for one in tree_leaves(args[at] if at < len(args) else kwargs.get(name))
            if isinstance(one, torch.Tensor)
        ]
        if metas and is_view and not targets:
            made = func(*args, **kwargs)
            self._others += [weakref.ref(one) for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
            return made
        changed = {view.memory for one in targets if (view := self._view(one)) is not None}
        for one in targets:
            if (view := self._view(one)) is not None:
                self._wrote(one, view, more=1)
        overwrites = _overwrites(func, targets, [view.memory for view in views.values() if view is not None])
        noted = tuple(
            views.get(at)
            or (_GeneratorState(leaf.get_state()) if isinstance(leaf, torch.Generator) else leaf)
            for at, leaf in enumerate(leaves)
        )
        state = torch.default_generator.get_state() if draws else None
        real = list(leaves)
        for at, view in metas.items():
            fresh = overwrites and leaves[at] is targets[0]
            real[at] = view.on(self._value(view.memory, fresh=fresh))
        given, named = tree_unflatten(real, form)
        found = func(*given, **named)
        outputs = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        for memory in changed - {view.memory for view in metas.values()}:
            self._values.pop(memory, None)
        if all(
            leaves[at].is_meta if view is None else view.memory not in self._kept
            for at, view in views.items()
        ):
            values = {StorageWeakRef(real[at].untyped_storage()).cdata for at in metas}
            made_now = {
                self._note(one): at
                for at, one in enumerate(outputs)
                if self._is_new(one) and (StorageWeakRef(one.untyped_storage()).cdata not in values)
            }
            if made_now or changed:
                self._add(_Operation(self._next(), func, noted, form, made_now, state, overwrites), changed)
        else:
            now = {id(leaf): real[at] for at, leaf in enumerate(leaves)}
            for one in targets:
                self._keep_value(now[id(one)], self._view(one))
        if metas and func._schema.name in _COPYING and self._view(found) and found.nbytes >= self._smallest:
            memory = self._known[StorageWeakRef(found.untyped_storage()).cdata][1]
            self._hold(memory, found.untyped_storage())
            self._copied = True
            return self._on_meta(found, memory)
        # What an operation in place returns is its argument.
        back = {id(real[at]): leaves[at] for at in metas}
        flat, shape = tree_flatten(found)
        return tree_unflatten([back.get(id(one), one) for one in flat], shape)

    def _set(self, func: Any, args: Any, views: Mapping[int, _View | None]) -> Any:
        """``one.set_(other)``, where one of them is deferred."""
        if func is not torch.ops.aten.set_.source_Tensor or views[1] is None:
            raise CannotDeferError(f"{func} of a parameter changes which memory it has")
        one, other = args
        if one.is_meta and not other.is_meta:
            other = self._on_meta(other, views[1].memory)
        elif other.is_meta and not one.is_meta:
            other = views[1].on(self._value(views[1].memory))
        return func(one, other)

    def _keep_value(self, written: torch.Tensor, view: _View | None) -> None:
        """Keep a written value that cannot be computed again, if a parameter's; else it is unknown."""
        if view is None:
            return
        if view.memory not in self._deferred:
            del self._known[StorageWeakRef(written.untyped_storage()).cdata]
            return
        if view.memory not in self._kept:
            storage = self._kept[view.memory] = written.untyped_storage()
            self._add(_Operation(self._next(), functools.partial(_copy_of, storage), made={view.memory: 0}))

    def _value(self, memory: int, *, fresh: bool = False) -> torch.UntypedStorage:
        """A memory with its present value, or any (``fresh``); operations on it change that value."""
        alive = self._kept.get(memory)
        if alive is None:
            alive = torch.UntypedStorage._new_with_weak_ptr(self._origin[memory].cdata)
        if alive is not None:
            return alive
        storage = self._values.pop(memory, None)
        if storage is None and fresh:
            storage = torch.UntypedStorage(self._bytes[memory])
        elif storage is None:
            storage = self._compute(memory, self._count)
        self._hold(memory, storage)
        return storage

    def _hold(self, memory: int, storage: torch.UntypedStorage) -> None:
        self._values[memory] = storage
        while len(self._values) > 1 and sum(one.nbytes() for one in self._values.values()) > _KEPT_BYTES:
            self._released += self._values.popitem(last=False)[1].nbytes()
        if self._released > 2 * _KEPT_BYTES:
            self._released = 0
            _give_back_pages()

    def _compute(self, memory: int, before: int) -> torch.UntypedStorage:
        """The value that a memory had before an operation, by its writers once more."""
        drawn, threads = torch.default_generator.get_state(), torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
                return self._run_writers(memory, before)
        finally:
            torch.default_generator.set_state(drawn)
            torch.set_num_threads(threads)

    def _run_writers(self, memory: int, before: int) -> torch.UntypedStorage:
        writers = [one for one in self._writers[memory] if one.number < before]
        whole = [at for at, one in enumerate(writers) if one.overwrites or memory in one.made]
        writers = writers[whole[-1] :]
        storage = torch.UntypedStorage(self._bytes[memory]) if writers[0].overwrites else None
        for one in writers:
            storages = {
                other: self._run_writers(other, one.number) for other in one.reads() if other != memory
            }
            if storage is not None:
                storages[memory] = storage
            given, named = tree_unflatten([_real(leaf, storages) for leaf in one.leaves], one.form)
            if one.state is not None:
                torch.default_generator.set_state(one.state)
            found = one.run(*given, **named)
            if memory in one.made:
                outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
                storage = outputs[one.made[memory]].untyped_storage()
        assert storage is not None
        return storage

    def _forget_all_but(self, memories: set[int]) -> None:
        needed, left = set(memories), list(memories)
        while left:
            for operation in self._writers[left.pop()]:
                new = operation.reads() - needed
                needed |= new
                left += new
        self._writers = {memory: self._writers[memory] for memory in needed}
        self._kept = {memory: storage for memory, storage in self._kept.items() if memory in needed}
        self._known = {key: (at, memory) for key, (at, memory) in self._known.items() if memory in memories}
        self._values.clear()
        self._modules.clear()
        _give_back_pages()


def _copy_of(storage: torch.UntypedStorage) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    return whole.set_(storage).clone()


class _AsOnTheHost(TorchFunctionMode):
    """Deferred tensors say that they are on the host, as they would be."""

    def __init__(self, weights: DeferredWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, of = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if name == "__get__" and of in _PLACES and self._weights.view_of(args[0]) is not None:
            return _PLACES[of]
        if name == "__set__" and of is torch.Tensor.data and self._weights.either_deferred(args):
            self._weights.replace(*args)
            return None
        if name in _FROM_OUTSIDE and args and isinstance(args[0], torch.Tensor):
            self._weights.seen_from_outside(args[0])
        return func(*args, **(kwargs or {}))


class _Unwritten(TorchDispatchMode):
    """Parameters that have memory, and values that count for nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By address; the references keep addresses from being given again.
        self._memories: dict[int, StorageWeakRef] = {}
        self._refused = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Leave the parameters of modules that are made meanwhile without values."""
        with contextlib.ExitStack() as stack:
            stack.callback(register_module_parameter_registration_hook(self._registered).remove)
            # What other threads read is not seen.
            stack.callback(threading.setprofile, threading.getprofile())
            threading.setprofile(self._thread_started)
            stack.enter_context(_Undispatched(self))
            stack.enter_context(self)
            yield

    def all_come(self, module: nn.Module) -> bool:
        """True if nothing is left without its value but what a load of the module's state overwrites."""
        saved = module.state_dict(keep_vars=True)
        coming = {
            StorageWeakRef(one.untyped_storage()).cdata
            for name, one in module.named_parameters()
            if saved.get(name) is one and one.nbytes == one.untyped_storage().nbytes()
        }
        return not self._refused and all(
            at in coming or memory.expired() for at, memory in self._memories.items()
        )

    def holds(self, tensor: Any) -> bool:
        """True if a tensor is in the memory of such a parameter."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return False
        with torch._C.DisableTorchFunction():
            return StorageWeakRef(tensor.untyped_storage()).cdata in self._memories

    def refuse(self, what: object) -> NoReturn:
        """Let the module be built again. Raises CannotDeferError: always."""
        self._refused = True
        raise CannotDeferError(f"{what} needs values")

    def _thread_started(self, *event: object) -> None:
        sys.setprofile(None)
        self._refused = True

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu":
            self._add(parameter)

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            with torch._C.DisableTorchFunction():
                reference = StorageWeakRef(tensor.untyped_storage())
            self._memories[reference.cdata] = reference

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it only writes to such a parameter."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        written, _, draws = _facts(func)
        name = func._schema.name
        if not any(map(self.holds, leaves)) or name in _BY_SHAPE_ALONE:
            return self.refuse(func) if draws else func(*args, **kwargs)
        if name in _COPYING and args[0].is_contiguous():
            made = torch.empty_like(args[0], **{k: v for k, v in kwargs.items() if k != "non_blocking"})
            self._add(made)
            return made
        if name == "aten::cat" and all(map(self.holds, args[0])):
            # Parts of it, e.g. this rank's of queries, keys and values.
            joined = func(*args, **kwargs)
            self._add(joined)
            return joined
        targets = tree_leaves([args[at] if at < len(args) else kwargs.get(name) for at, name in written])
        if torch.Tag.inplace_view in func.tags or not all(map(self.holds, targets)):
            self.refuse(func)
        in_place = name.endswith("_") and [at for at, _ in written] == [0]
        if in_place and sum(isinstance(one, torch.Tensor | torch.Generator) for one in leaves) == 1:
            return args[0]
        # A view, or values that come from elsewhere.
        found = None if draws else func(*args, **kwargs)
        if draws or not all(map(self.holds, tree_leaves(found))):
            self.refuse(func)
        return found


class _Undispatched(TorchFunctionMode):
    """Looks at a parameter's values that no operation makes."""

    def __init__(self, unwritten: _Unwritten) -> None:
        super().__init__()
        self._unwritten = unwritten

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _UNDISPATCHED and any(map(self._unwritten.holds, tree_leaves((args, kwargs)))):
            self._unwritten.refuse(name)
        return func(*args, **(kwargs or {}))


def _give_back_pages() -> None:
    """Let the C library return what was freed; glibc keeps it for later where small blocks lie between."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _facts(func: Any) -> tuple[tuple[tuple[int, str], ...], bool, bool]:
    """Place and name of arguments that it writes to; whether it gives a view; whether it draws numbers."""
    infos = [(at, one.name, one.alias_info) for at, one in enumerate(func._schema.arguments)]
    written = tuple((at, name) for at, name, info in infos if info is not None and info.is_write)
    return (
        written,
        any(info is not None for _, _, info in infos),
        torch.Tag.nondeterministic_seeded in func.tags,
    )


def _overwrites(func: Any, targets: list[torch.Tensor], memories: list[int]) -> bool:
    """True if nothing is left of what its target had before; ``memories``: of all its arguments."""
    return (
        func._schema.name in _OVERWRITING
        and len(targets) == 1
        and len(memories) == len(set(memories))
        and targets[0].is_contiguous()
        and targets[0].nbytes == targets[0].untyped_storage().nbytes()
    )


def _real(leaf: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(leaf, _View):
        return leaf.on(storages[leaf.memory])
    return leaf.generator() if isinstance(leaf, _GeneratorState) else leaf
