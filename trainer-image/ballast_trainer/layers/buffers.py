"""Buffers of layers: the state that is not learnt, such as the running statistics of BatchNorm.

A single process changes them once for each microbatch that it trains on, and by nothing else.  So a
trial of a plan runs on copies, a second forward of the same microbatch starts from the buffers that the first
one found and changes none, and the buffers of replicas are combined after each step.

PyTorch's kernels write running statistics without telling autograd; so copies take the buffers'
places, and the buffers themselves are never written back to, which a pending backward would refuse.
"""

import contextlib
import functools
import logging
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ballast_trainer.seeding import host_seeded

logger = logging.getLogger(__name__)

Buffers = list[tuple[nn.Module, dict[str, torch.Tensor | None]]]
"""Modules, and their own buffers by name; None: one that the first forward makes."""


def copies_of(modules: Iterable[nn.Module]) -> Buffers:
    """Copies of the modules' own buffers, with their present values; one of what several of them share."""
    found: Buffers = []
    copies: dict[torch.Tensor | None, torch.Tensor | None] = {None: None}
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer not in copies:
                copies[buffer] = buffer.detach().clone()
        held = {name: copies[buffer] for name, buffer in module._buffers.items()}
        if held:
            found.append((module, held))
    return found


def renew(modules: Iterable[nn.Module]) -> None:
    """Let a forward write copies of the modules' buffers: a backward that is to come may need what they were.

    Running statistics are none that a backward needs.
    """
    for module, held in copies_of(module for module in modules if not isinstance(module, _NormBase)):
        module._buffers.update(held)


@contextlib.contextmanager
def in_place(copies: Buffers) -> Iterator[Callable[[], list[tuple[nn.Module, str]]]]:
    """Let the modules work on copies; their buffers come back as they were.

    Yields:
        Which buffers were written so far (module, name), whatever the values: of some inputs, such as the
        zeros of a trial, a running mean comes out as it was.  Running statistics count in any case.
    """
    originals = [(module, dict(module._buffers)) for module, _ in copies]
    versions = {id(copy): copy._version for _, held in copies for copy in held.values() if copy is not None}
    for module, held in copies:
        module._buffers.update(held)

    def was_written(before: torch.Tensor | None, now: torch.Tensor) -> bool:
        if before is not None and before.layout is not torch.strided:
            return False
        return before is None or versions.get(id(now)) != now._version or not torch.equal(before, now)

    def changed() -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module, before in originals
            for name, value in before.items()
            if isinstance(module, _NormBase)
            or ((now := module._buffers.get(name)) is not None and was_written(value, now))
        ]

    try:
        yield changed
    finally:
        for module, before in originals:
            module._buffers.clear()
            module._buffers.update(before)


def in_place_of_loss(loss: object) -> contextlib.AbstractContextManager[object]:
    """Let a loss that is a module work on copies, too: it is not among a rank's layers."""
    return in_place(copies_of(loss.modules() if isinstance(loss, nn.Module) else ()))


class StepBuffers:
    """Buffers of layers whose replicas train different microbatches, from a step's begin to its end."""

    def __init__(self, modules: Iterable[nn.Module], microbatches: Sequence[range]) -> None:
        """Buffers as a step begins; ``microbatches``: those of each replica, as one process numbers them."""
        self._started, self._microbatches = copies_of(modules), microbatches
        self._momenta = {
            module: module.momentum
            for module, _ in self._started
            if isinstance(module, _NormBase) and module.momentum is not None
        }
        for module, momentum in self._momenta.items():
            module.momentum = self._between(momentum)

    def _between(self, momentum: float) -> float:
        """The momentum that lets a replica's statistics fade as those of one process.

        That one trains other replicas' microbatches before this one's next.
        """
        return 1 - (1 - momentum) ** self._microbatches[0].step

    def merge(self, gather: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
        """Combine the buffers of the replicas; they are the same on each afterwards.

        Running statistics become those of one process.  Other floating-point buffers become the mean of the
        replicas', counts grow by what all replicas have counted.

        Args:
            gather: a flat tensor of every replica, by replica; collective over them.
        """
        for norm, momentum in self._momenta.items():
            norm.momentum = momentum
        started = [
            (module, {name: _real(buffer) for name, buffer in held.items() if buffer is not None})
            for module, held in self._started
        ]
        current = [buffer for module, held in started for name, buffer in _pick(module, held)]
        if not current:
            return
        flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in current])
        rows = [list(_split(row, current)) for row in gather(flat)]
        place = 0
        for module, held in started:
            names = [name for name, _ in _pick(module, held)]
            found = {name: [row[place + i] for row in rows] for i, name in enumerate(names)}
            place += len(names)
            for name, value in self._merged(module, held, found).items():
                buffer = module._buffers[name]
                assert buffer is not None
                with torch.no_grad():
                    buffer.copy_(torch.view_as_complex(value) if buffer.is_complex() else value)

    def _merged(
        self, module: nn.Module, held: dict[str, torch.Tensor], found: dict[str, list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        merged = {}
        for name, values in found.items():
            before = held[name].double()
            if isinstance(module, _NormBase) and name in ("running_mean", "running_var"):
                merged[name] = self._running(module, before, values, held, found)
            elif held[name].is_floating_point():
                merged[name] = torch.stack(values).mean(0)
            elif held[name].dtype is torch.bool:
                merged[name] = torch.stack(values).amax(0)
            else:
                merged[name] = before + sum(value - before for value in values)
        return merged

    def _running(
        self,
        module: _NormBase,
        before: torch.Tensor,
        values: Sequence[torch.Tensor],
        held: Mapping[str, torch.Tensor],
        found: Mapping[str, Sequence[torch.Tensor]],
    ) -> torch.Tensor:
        """Running statistics of one process, from those of replicas that all started from ``before``.

        One process with momentum m makes ``(1-m)^K before + sum_k m (1-m)^(K-1-k) x_k`` of its K
        microbatches.  A replica of every s-th of them, with momentum ``n = 1 - (1-m)^s``, has the same sum
        over its own, but for ``n/m`` and a power for those that follow its last.  Without momentum, the
        statistics are the mean of all microbatches.
        """
        counts = found.get("num_batches_tracked", ())
        start = float(held["num_batches_tracked"]) if counts else 0.0
        own = [float(count) - start for count in counts]
        if not any(own):
            # InstanceNorm does not count.
            own = [float(len(of)) for of in self._microbatches]
        momentum = module.momentum
        if momentum is None:
            steps = zip(values, own, strict=True)
            grown = [value * (start + made) - before * start for value, made in steps]
            return (before * start + sum(grown)) / max(start + sum(own), 1)
        if momentum == 0:
            return before
        between = self._between(momentum)
        result = (1 - momentum) ** sum(own) * before
        for value, made, of in zip(values, own, self._microbatches, strict=True):
            following = sum(
                count * sum(k > of[-1] for k in other) / len(other)
                for count, other in zip(own, self._microbatches, strict=True)
            )
            share = momentum / between * (1 - momentum) ** following
            result = result + share * (value - (1 - between) ** made * before)
        return result


def _pick(module: nn.Module, held: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    found = ((name, module._buffers.get(name)) for name in held)
    now = [(name, _real(one)) for name, one in found if one is not None]
    return [(name, one) for name, one in now if one.shape == held[name].shape]


def _real(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer, its complex numbers as pairs of real ones."""
    return torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for part, one in zip(flat.split([one.numel() for one in like]), like, strict=True):
        yield part.view(one.shape)


ATTRIBUTES_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of every module that have what it has registered."""


class _Generators(NamedTuple):
    """Generators of a class, and how their state is read and written."""

    of: type
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


_GENERATORS = (
    # As bytes: tensors that are equal are not pickled alike.
    _Generators(
        torch.Generator,
        lambda generator: bytes(generator.get_state().tolist()),
        lambda generator, state: generator.set_state(torch.tensor(list(state), dtype=torch.uint8)),
    ),
    _Generators(
        numpy.random.Generator,
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    _Generators(random.Random, random.Random.getstate, random.Random.setstate),
)


def _version(value: object) -> int | None:
    """Count of a tensor's changes in place; None: it is none, or has no count."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _is_still(number: float, now: object) -> bool:
    # A tensor in its place has no truth, and a NaN that is still there differs from itself.
    return now is number or (type(now) is type(number) and now == number)


class Attributes:
    """Attributes of modules that are no parameters, buffers or modules, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [
            (part, {k: v for k, v in vars(part).items() if k not in ATTRIBUTES_OF_MODULES})
            for part in modules
        ]
        self._generators = [
            (part, name, value, kind, kind.get(value))
            for part, attributes in self._kept
            for name, value in attributes.items()
            for kind in _GENERATORS
            # A system's generator has no state.
            if isinstance(value, kind.of) and not isinstance(value, random.SystemRandom)
        ]
        self._versions = [{k: _version(v) for k, v in attributes.items()} for _, attributes in self._kept]

    def tell_changed(self) -> None:
        """Warn, once a class, of numbers and tensors that have changed, and generators drawn from."""
        numbers = [
            (part, name)
            for part, attributes in self._kept
            for name, value in attributes.items()
            if type(value) in (int, float) and not _is_still(value, vars(part).get(name))
        ]
        tensors = [
            (part, name)
            for (part, attributes), versions in zip(self._kept, self._versions, strict=True)
            for name, now in vars(part).items()
            # Torch's own modules have weights there that hooks compute before each forward.
            if _version(now) is not None and not now.requires_grad
            if not type(part).__module__.startswith("torch.")
            if now is not attributes.get(name) or _version(now) != versions[name]
        ]
        drawn = [
            (part, name)
            for part, name, value, kind, state in self._generators
            if pickle.dumps(kind.get(value)) != pickle.dumps(state)
        ]
        for part, name in numbers + tensors + drawn:
            _tell_changed(type(part).__module__, type(part).__name__, name)

    def restore(self) -> None:
        """Put back what was replaced, and the generators; what was changed in place stays changed."""
        for _, _, value, kind, state in self._generators:
            kind.set(value, state)
        for part, attributes in self._kept:
            for name in vars(part).keys() - attributes.keys() - ATTRIBUTES_OF_MODULES:
                del vars(part)[name]
            vars(part).update(attributes)


@functools.cache
def _tell_changed(module: str, kind: str, name: str) -> None:
    if not module.startswith("ballast_trainer."):
        logger.warning(
            "%s.%s changes in a forward, and neither moves with its layer nor is saved: a loss that "
            "depends on it is another one after a move or a restart. To fix: register_buffer; for random "
            "numbers the generators of torch, numpy and Python themselves, which are seeded for each layer",
            kind,
            name,
        )


def tell_of_replicas(stateful: Iterable[nn.Module]) -> None:
    """Warn, once a class, of modules whose buffers change in a forward that replicas do not all see."""
    for module in stateful:
        if not isinstance(module, _NormBase):
            names = ", ".join(module._buffers)
            _tell_of_replicas(type(module).__module__, f"{type(module).__name__} ({names})")


@functools.cache
def _tell_of_replicas(module: str, kind: str) -> None:
    if not module.startswith("ballast_trainer."):
        logger.warning(
            "%s changes buffers in a forward: each replica has its own until the step ends, then their mean, "
            "and counts add up. An output that depends on them is another one than in one process. To fix: "
            "parallelism.data: 1 without pipeline.replicas, or buffers that no output depends on",
            kind,
        )


def tell_of_hooks(layers: Iterable[nn.Module]) -> None:
    """Warn, once a class, of hooks that see what one replica has added up of a gradient."""
    for layer in layers:
        if any(parameter._post_accumulate_grad_hooks for parameter in layer.parameters()):
            _tell_of_hooks(type(layer).__name__)


@functools.cache
def _tell_of_hooks(kind: str) -> None:
    logger.warning(
        "%s has a hook by register_post_accumulate_grad_hook: it sees the gradients of one replica before "
        "they are added up, and one that clips them, e.g., has another result than in one process. To fix: "
        "register_hook, which sees those of a microbatch, training.clipNorm, or parallelism.data: 1",
        kind,
    )


@contextlib.contextmanager
def attributes_back(modules: Iterable[nn.Module]) -> Iterator[Attributes]:
    """Attributes and generators come back, e.g. what a layer has counted in its newest forward."""
    attributes = Attributes(modules)
    try:
        yield attributes
    finally:
        attributes.restore()


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients; buffers, attributes and generators (``device``'s, too) come back."""
    whole = [part for module in modules for part in module.modules()]
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with host_seeded(), in_place(copies_of(whole)), attributes_back(whole), torch.no_grad():
        try:
            for part in whole:
                part.training = False
            yield
        finally:
            if of_device is not None:
                torch.cuda.set_rng_state(of_device, device)
