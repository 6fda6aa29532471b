"""Layer freezing: a growing prefix of the layers stops learning.

A frozen layer computes no weight gradients, and below the first layer that learns no gradient is
computed or sent at all.  PipeTransformer and Egeria freeze from the front for that reason.

The prefix grows linearly in the steps, or by a criterion that each layer fulfils at several looks in a row:
its weights hardly move, its gradients have become small, or its plasticity has settled.  A frozen layer shows
none of these, so after ``thawSteps`` it learns again until the criterion holds again (Egeria unfreezes when
learning changes).  What a layer has to remember travels with it as buffers: 264 numbers, and one sequence
that came into it where its plasticity is measured.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, FreezingCriterion, FreezingSettings
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics import plasticity
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.dynamics.schedule import ChangeSteps, whole_units
from ballast_trainer.layers.frozen_outputs import FrozenOutputs
from ballast_trainer.layers.layer import MODULE, Layer, LayerSet
from ballast_trainer.layers.optimize import squared_gradient_norm
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.layers.slicing import Slicing, axis_of, slicings
from ballast_trainer.seeding import mixed_key

SKETCH = 256
"""Numbers that stand for all weights of a layer; distances come out to about 6 % (Johnson-Lindenstrauss)."""


def squared_gradients(module: nn.Module) -> float | None:
    """This rank's part of the squared norm of a layer's gradients; None where it has no gradients."""
    learnt = [(p, counts) for p, _, counts in _parts(module) if p.grad is not None]
    return squared_gradient_norm(p for p, counts in learnt if counts) if learnt else None


def sketch(layer: Layer) -> torch.Tensor:
    """This rank's part of a layer's weights added up with random signs, float64, shape (SKETCH,)."""
    total = torch.zeros(SKETCH, dtype=torch.float64)
    layer.gather()
    axis = axis_of(layer.module)
    for number, (parameter, slicing, counts) in enumerate(_parts(layer.module)):
        if not counts:
            continue
        part = parameter.detach().cpu().double()
        if slicing is not None:
            # In its place in the whole parameter, whose signs are those of one process.
            part = slicing.whole(
                [part if at == axis.index else part.new_zeros(()).expand_as(part) for at in range(axis.size)]
            )
        flat = part.reshape(-1)
        generator = torch.Generator().manual_seed(mixed_key(layer.index, number) >> 1)
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8) * 2 - 1
        signed = nn.functional.pad(flat * signs, (0, -len(flat) % SKETCH))
        total += signed.view(-1, SKETCH).sum(0)
    return total


def is_cut(module: nn.Module) -> bool:
    """True if this rank holds a part of the layer."""
    return bool(slicings(module))


def _parts(module: nn.Module) -> Iterator[tuple[nn.Parameter, Slicing | None, bool]]:
    """Parameters, how each is cut, and whether this rank counts it."""
    cut, first = slicings(module), axis_of(module).index == 0
    for name, parameter in module.named_parameters():
        yield parameter, cut.get(name), first or name in cut


BUFFER = "ballast_freezing"
"""Buffer of a layer's module: the entries of :class:`_Place`, then the sketch of its weights."""
REMEMBERED = (BUFFER, *plasticity.NAMES)
"""Buffers that freezing adds to a layer."""

_FIRST_LOOKS = 2
"""Looks whose mean gradient norm (root of the mean square) later ones are compared with."""


@dataclasses.dataclass(slots=True)
class _Place:
    """State of a layer from look to look, as the head of its buffer."""

    frozen: float = 0.0
    held: float = 0.0
    frozen_at: float = 0.0
    looks: float = 0.0
    first_norm: float = 0.0
    squared_norms: float = 0.0
    steps: float = 0.0
    figure: float = math.inf

    @classmethod
    def of(cls, module: nn.Module) -> "_Place":
        buffer = module.get_buffer(BUFFER)
        return cls(*buffer[: len(dataclasses.fields(cls))].tolist())

    def write(self, module: nn.Module) -> None:
        values = dataclasses.astuple(self)
        module.get_buffer(BUFFER)[: len(values)] = torch.tensor(values, dtype=torch.float64)


_HEAD = len(dataclasses.fields(_Place))


class Freezing(Dynamic):
    """Freezes up to ``target`` of the layers; the last layer always learns."""

    needs_rebuild = True
    measures: str | None = "frozen"
    order = 3

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        self._settings = config.freezing or FreezingSettings()
        self._steps = ChangeSteps.of(config)
        target = 1.0 if config.target is None else config.target
        self._most = most_frozen(config, layer_count)
        self._share = target * layer_count
        self._layer_count = layer_count
        self._by_steps = self._settings.criterion == FreezingCriterion.SCHEDULE
        self._replicas = Axis()
        self.outputs: FrozenOutputs | None = None
        if self._settings.cache_bytes is not None:
            self.outputs = FrozenOutputs(self._settings.cache_bytes)

    def frozen_count(self, step: int) -> int:
        """Number of layers that the schedule has frozen when ``step`` runs."""
        return min(whole_units(self._share * self._steps.progress(step)), self._most)

    def without_effect(self, total_steps: int) -> str:
        """No layer is frozen by the end."""
        most = self.frozen_count(total_steps - 1) if self._by_steps else self._most
        few = f"target lets less than one of {self._layer_count} layers freeze in {total_steps} steps"
        return self._steps.too_late(total_steps) or ("" if most else few)

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Make room, with a criterion, for what the layer has to remember."""
        if not self._by_steps:
            state = torch.zeros(_HEAD + SKETCH, dtype=torch.float64)
            state[:_HEAD] = torch.tensor(dataclasses.astuple(_Place()), dtype=torch.float64)
            module.register_buffer(BUFFER, state)
        if self._settings.criterion == FreezingCriterion.PLASTICITY:
            plasticity.prepare(module)
        return module

    def reapply(self, step: int, layers: LayerSet) -> None:
        """Freeze the layers that are frozen before ``step``."""
        if self._by_steps:
            self._freeze(layers, self.frozen_count(step - 1))
            return
        for layer in layers:
            _learn(layer, _Place.of(layer.module).frozen == 0)

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Freeze, or thaw, the layers that are due at ``step``."""
        if not self._by_steps:
            return self._steps.acts_at(step) and self._look(step, layers, world)
        now = self.frozen_count(step)
        if now == self.frozen_count(step - 1):
            return False
        self._freeze(layers, now)
        return True

    def after_backward(self, layers: LayerSet) -> None:
        """Note what the criterion compares at its next look: norms of gradients, or how alike outputs are."""
        if self._settings.criterion == FreezingCriterion.PLASTICITY:
            for layer in layers:
                plasticity.noted(layer.module, self._replicas)
        if self._settings.criterion != FreezingCriterion.GRADIENT_NORM:
            return
        for layer in layers:
            squared = squared_gradients(layer.module)
            # One that is not finite is of a step that fp16 skips.
            if squared is not None and math.isfinite(squared):
                place = _Place.of(layer.module)
                place.squared_norms += squared / CURRENT_FORWARD.loss_scale**2
                place.steps += 1
                place.write(layer.module)

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """State of each layer, frozen or not, and the criterion's newest figure of those that learn."""
        found: dict[str, dict[int, Any]] = {
            "layers": {
                layer.index: float(not any(p.requires_grad for p in layer.module.parameters()))
                for layer in layers
                if any(True for _ in layer.module.parameters())
            }
        }
        if not self._by_steps:
            figures = {layer.index: _Place.of(layer.module).figure for layer in layers}
            found["figures"] = {i: value for i, value in figures.items() if math.isfinite(value)}
        if self.outputs is not None:
            found["cached"] = dict(self.outputs.samples())
            found["cacheRefused"] = dict(self.outputs.refusals)
        return found

    def idle(self, figures: Mapping[str, Mapping[int, Any]]) -> str:
        """No layer is frozen."""
        learns, seen = figures["layers"], figures.get("figures", {})
        if any(learns.values()):
            return ""
        # Layers freeze from the front.
        first = min(learns, default=0)
        if first not in seen:
            return "no layer is frozen"
        return (
            f"no layer is frozen: layer {first} would be the first, its figure is {seen[first]:.3g}, and has "
            f"to be below {self._settings.threshold:g} at {self._settings.patience} looks in a row"
        )

    def _look(self, step: int, layers: LayerSet, world: World) -> bool:
        self._replicas = world.data
        mine, were = {}, {}
        seen = self._seen(layers, world)
        for layer in layers:
            place = _Place.of(layer.module)
            were[layer.index] = bool(place.frozen)
            if place.frozen and self._thaws(place, step):
                if self._settings.criterion == FreezingCriterion.PLASTICITY:
                    plasticity.forget(layer.module)
                place = _Place(first_norm=place.first_norm, looks=place.looks)
            elif not place.frozen:
                figure = self._figure(step, layer, place, seen.get(layer.index))
                held = place.held + 1 if figure < self._settings.threshold else 0.0
                place = dataclasses.replace(
                    place, held=held, figure=figure, looks=place.looks + 1, squared_norms=0.0, steps=0.0
                )
            place.write(layer.module)
            mine[layer.index] = bool(place.frozen) or place.held >= self._settings.patience
        parts = world.gather((mine, were))
        prefix = 0
        # Ranks that hold the same layer measure it apart: all of them have to agree.
        while prefix < self._most and all(ready.get(prefix, True) for ready, _ in parts):
            prefix += 1
        for layer in layers:
            place = _Place.of(layer.module)
            frozen = layer.index < prefix
            if self._settings.criterion == FreezingCriterion.PLASTICITY and not frozen:
                plasticity.note_step(layer.module)
            if frozen and not place.frozen:
                place.frozen_at = step
            if place.frozen and not frozen:
                # A layer before it learns again.
                place.held = 0.0
            place.frozen = float(frozen)
            place.write(layer.module)
            _learn(layer, not frozen)
        return any(frozen != (index < prefix) for _, of in parts for index, frozen in of.items())

    def _thaws(self, place: _Place, step: int) -> bool:
        after = self._settings.thaw_steps
        return after is not None and step - place.frozen_at >= after

    def _seen(self, layers: LayerSet, world: World) -> dict[int, torch.Tensor]:
        """Tensors that the criterion reads, of whole layers that learn; collective over a tensor group."""
        parts: dict[int, torch.Tensor] = {}
        for layer in layers:
            place = _Place.of(layer.module)
            if place.frozen:
                continue
            if self._settings.criterion == FreezingCriterion.WEIGHT_CHANGE:
                parts[layer.index] = sketch(layer)
            elif self._settings.criterion == FreezingCriterion.GRADIENT_NORM:
                parts[layer.index] = torch.tensor([place.squared_norms], dtype=torch.float64)
        cut = [layer.index for layer in layers if layer.index in parts and is_cut(layer.module)]
        if cut:
            summed = torch.stack([parts[index] for index in cut]).to(world.device)
            parts |= dict(zip(cut, world.tensor.all_reduce(summed).cpu(), strict=True))
        return parts

    def _figure(self, step: int, layer: Layer, place: _Place, seen: torch.Tensor | None) -> float:
        """Figure that the criterion compares with the threshold; infinite where it cannot tell yet."""
        if not any(p.requires_grad for p in layer.module.parameters()):
            return 0.0
        if self._settings.criterion == FreezingCriterion.PLASTICITY:
            slope = plasticity.look(layer.module)
            return math.inf if slope is None else slope
        assert seen is not None, "of every layer that learns"
        if self._settings.criterion == FreezingCriterion.GRADIENT_NORM:
            if place.steps == 0:
                # Before the first step: none of the first looks.
                place.looks -= 1
                return math.inf
            norm = math.sqrt(float(seen) / place.steps)
            if place.looks < _FIRST_LOOKS:
                place.first_norm += norm / _FIRST_LOOKS
                return math.inf
            return norm / place.first_norm if place.first_norm > 0 else 0.0
        before = layer.module.get_buffer(BUFFER)[_HEAD:].to(seen.device, copy=True)
        layer.module.get_buffer(BUFFER)[_HEAD:] = seen
        last = self._steps.last_at(step - 1)
        if place.looks == 0 or last is None:
            return math.inf
        size = float(seen.norm())
        # The look at endStep comes sooner after the one before it than the others do.
        return float((seen - before).norm()) / size / (step - last) if size > 0 else 0.0

    @staticmethod
    def _freeze(layers: LayerSet, count: int) -> None:
        for layer in layers:
            if layer.index < count:
                _learn(layer, False)


def as_remembered(tensors: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's saved tensors for a ``module`` for which freezing was switched on or off since."""
    kept = {name: value for name, value in tensors.items() if name.removeprefix(MODULE) not in REMEMBERED}
    own = {MODULE + name: module._buffers.get(name) for name in REMEMBERED}
    return kept | {key: tensors.get(key, value.clone()) for key, value in own.items() if value is not None}


def most_frozen(config: DynamicConfig, layer_count: int) -> int:
    """Most layers that may be frozen at once: the last one always learns."""
    target = 1.0 if config.target is None else config.target
    return min(whole_units(target * layer_count), layer_count - 1)


def frozen_layers(layers: LayerSet) -> set[int]:
    """Indices of the layers held that do not learn."""
    return {layer.index for layer in layers if not any(p.requires_grad for p in layer.module.parameters())}


def _learn(layer: Layer, learns: bool) -> None:
    for name, parameter in layer.module.named_parameters():
        parameter.requires_grad_(learns and name not in layer.fixed)
        if not learns:
            parameter.grad = None
