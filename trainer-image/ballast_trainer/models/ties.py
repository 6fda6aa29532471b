"""Tied weights: one parameter that several layers of a model share, e.g. embedding and output head.

A tie is the parameter's place in each of these layers, as (layer, name), the first layer first.  That
layer owns the parameter: its optimizer updates it, and the other layers have copies.
"""

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ballast_trainer.models.deferred import address_of

logger = logging.getLogger(__name__)

Member = tuple[int, str]
"""A layer, and the name that the parameter has in it."""

Tie = tuple[Member, ...]

_Known = dict[int, tuple[weakref.ref[torch.Tensor], list[Member]]]
"""Tensors by identity, and the layers that have them."""

_SEPARATE = "To fix: give each layer its own"


class TieSearch:
    """Finds parameters that layers share, one layer after the other.

    Layers may be built for the search and released again: what they share outlives them, since a closure, a
    cache or another layer refers to it.
    """

    def __init__(self) -> None:
        self._parameters: _Known = {}
        self._memory: dict[int, tuple[weakref.ref[torch.Tensor], Member]] = {}
        self._statistics: dict[int, tuple[weakref.ref[torch.Tensor], Member]] = {}
        self._buffers: _Known = {}
        self._found: tuple[list[_Seen], list[_Seen], list[_Seen]] = ([], [], [])

    def look_at(self, module: nn.Module) -> None:
        """Note what a layer has; the caller then releases it, unless it is kept anyway."""
        self._found = (
            [_Seen(name, parameter) for name, parameter in module.named_parameters()],
            [
                _Seen(name, part.running_mean)
                for name, part in module.named_modules()
                if isinstance(part, _NormBase) and part.running_mean is not None
            ],
            [_Seen(name, buffer) for name, buffer in module.named_buffers()],
        )

    def add(self, index: int) -> None:
        """Count what :meth:`look_at` has noted, and still exists, as layer ``index``'s.

        Raises:
            ValueError: it shares with another layer what cannot be tied.
        """
        parameters, statistics, buffers = self._found
        for seen in statistics:
            if seen.reference() is None:
                continue
            known = self._statistics.get(seen.identity)
            if known is not None and known[0]() is not None and known[1][0] != index:
                raise ValueError(
                    f"layers {known[1][0]} and {index} share {seen.name or 'a module'!r}, whose running "
                    f"statistics each of them changes. {_SEPARATE}"
                )
            self._statistics[seen.identity] = (seen.reference, (index, seen.name))
        for seen in parameters:
            if seen.reference() is None:
                continue
            self._refuse_shared_memory(index, seen)
            _note(self._parameters, index, seen)
        for seen in buffers:
            if seen.reference() is None:
                continue
            self._refuse_memory_of_parameter(index, seen)
            _note(self._buffers, index, seen)

    def _refuse_shared_memory(self, index: int, seen: "_Seen") -> None:
        if not seen.address:
            return
        known = self._memory.get(seen.address)
        other = known[0]() if known is not None else None
        if known is not None and other is not None and id(other) != seen.identity and known[1][0] != index:
            raise ValueError(
                f"{as_text([known[1], (index, seen.name)])} are two parameters in the same memory. "
                "To fix: one parameter for both (head.weight = embedding.weight)"
            )
        self._memory[seen.address] = (seen.reference, (index, seen.name))

    def _refuse_memory_of_parameter(self, index: int, seen: "_Seen") -> None:
        known = self._memory.get(seen.address) if seen.address else None
        if known is not None and known[0]() is not None:
            raise ValueError(
                f"{as_text([known[1], (index, seen.name)])} are a parameter and a buffer in the same memory: "
                "the buffer would not learn with it. To fix: clone() it, or compute it in the forward"
            )

    def ties(self) -> tuple[Tie, ...]:
        """Ties of the layers so far."""
        return _shared(self._parameters)

    def shared_buffers(self) -> tuple[Tie, ...]:
        """Buffers that several of the layers so far have, as ties of parameters."""
        return _shared(self._buffers)


def _note(known: _Known, index: int, seen: "_Seen") -> None:
    found = known.get(seen.identity)
    if found is None or found[0]() is None:
        found = known[seen.identity] = (seen.reference, [])
    found[1].append((index, seen.name))


def _shared(known: _Known) -> tuple[Tie, ...]:
    return tuple(tuple(members) for _, members in known.values() if len(members) > 1)


class _Seen:
    """A tensor that a layer has, without keeping it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.identity = name, id(tensor)
        self.reference = weakref.ref(tensor)
        shaped = not nn.parameter.is_lazy(tensor) and tensor.numel() > 0
        plain = shaped and tensor.layout == torch.strided and not tensor.is_meta
        self.address = address_of(tensor) if plain else 0


def search_layers(modules: Mapping[int, nn.Module]) -> TieSearch:
    """What built layers share, by index. Raises ValueError: two layers share what cannot be tied."""
    search = TieSearch()
    for index, module in modules.items():
        search.look_at(module)
        search.add(index)
    return search


def merged(ties: Iterable[Sequence[Member]]) -> tuple[Tie, ...]:
    """Ties with a common member as one; members by layer, ties by their first."""
    groups: list[set[Member]] = []
    for tie in ties:
        group = {(int(layer), str(name)) for layer, name in tie}
        for other in [known for known in groups if known & group]:
            groups.remove(other)
            group |= other
        groups.append(group)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def as_text(tie: Sequence[Member]) -> str:
    """Text for messages: ``'weight' of layer 0 and '1.weight' of layer 5``."""
    return " and ".join(f"{name!r} of layer {layer}" for layer, name in tie)
