"""The input of a plan: measured layers, the file that holds them, and the GPUs to plan for.

The file is what ``ballast-train profile`` prints, or a running job's report.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from ballast_policies.contract.decode import decode
from ballast_policies.contract.errors import ContractError, Problem, camel
from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.contract.model import Model, Settings
from ballast_policies.planning.memory.rank_bytes import LayerSums
from ballast_policies.planning.partition import PlanningError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Layers as measured on a GPU of speed 1, each tuple of shape (L,).

    Attributes:
        forward_seconds, backward_seconds: of one microbatch.
        held_bytes: parameters, gradients and optimizer state.
        weight_bytes: the parameters alone; each further version of the weights costs them again.
        activation_bytes: kept for the backward, of one microbatch.
        output_bytes: sent to the next layer, of one microbatch.
        overhead_seconds: what a microbatch costs whatever its size (kernel launches): a part of the forward
            and backward seconds; none given: 0.
        repeated_bytes: kept by a repeated forward while the layer's backward runs; none given: 0.
        gradient_bytes: gradients from which those of the weights are computed; none given: 0.
        expert_bytes: of the parameters, those of experts, of which each replica has a part; none given: 0.
        experts: how many; 0: not known, they divide evenly.
        routed_bytes: sent to experts, of one microbatch, and as many back; none given: 0.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    held_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    overhead_seconds: tuple[float, ...] = ()
    repeated_bytes: tuple[float, ...] = ()
    gradient_bytes: tuple[float, ...] = ()
    expert_bytes: tuple[float, ...] = ()
    experts: tuple[int, ...] = ()
    routed_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.default == () and not getattr(self, field.name):
                object.__setattr__(self, field.name, (0.0,) * len(self.forward_seconds))
        lengths = {field.name: len(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if len(set(lengths.values())) != 1 or not self.forward_seconds:
            raise PlanningError(f"every layer needs every value, the counts are: {lengths}")

    @classmethod
    def of(cls, layers: Sequence[object]) -> Self:
        """Columns of layers that have a value of each field's name."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: tuple(getattr(layer, name) for layer in layers) for name in names})

    @property
    def sums(self) -> LayerSums:
        """Bytes of neighbouring layers."""
        return LayerSums(
            held=self.held_bytes,
            weights=self.weight_bytes,
            activations=self.activation_bytes,
            outputs=self.output_bytes,
            repeated=self.repeated_bytes,
            gradients=self.gradient_bytes,
            experts=self.expert_bytes,
        )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.forward_seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """``count`` GPUs of ``gpu_type``, ``speed`` x as fast as the profile's.

    ``memory_bytes`` None: not limited.
    """

    gpu_type: str
    count: int
    speed: float = 1.0
    memory_bytes: float | None = None


def held_by_replica(
    held: ArrayLike,
    weight_bytes: ArrayLike,
    replicas: int,
    gradients: int = 1,
    weights: int = 1,
    *,
    expert_bytes: ArrayLike = 0.0,
    expert_part: ArrayLike = 1.0,
) -> np.ndarray:
    """Bytes of layers on one of some replicas that share the optimizer's state, gradients and weights.

    A layer without weights, e.g. with buffers alone, is whole on each.

    Args:
        held: on a replica that shares nothing.
        weight_bytes: of these.
        replicas: that share the optimizer's state (ZeRO-1).
        gradients: that share these, too (ZeRO-2).
        weights: that share these, too (ZeRO-3).
        expert_bytes: of the weights, those of experts; gradients and state are where these are.
        expert_part: that the replica has of them.
    """
    each = np.asarray(weight_bytes, dtype=float)
    part = np.divide(expert_bytes, each, out=np.zeros_like(each), where=each > 0)
    apart, held, each = part * held * expert_part, (1 - part) * held, (1 - part) * each
    learnt = np.minimum(each, np.subtract(held, each))
    state = np.maximum(0.0, np.subtract(held, 2 * each))
    shared = each / weights + learnt / gradients + state / replicas
    found: np.ndarray = apart + np.where(each > 0, shared, held)
    return found


def fullest_part(experts: ArrayLike, replicas: int) -> np.ndarray:
    """Part of each layer's experts that the fullest of some replicas has, as many as others but for one.

    ``experts``: how many a layer has; 0: not known, they divide evenly.
    """
    count = np.asarray(experts, dtype=float)
    part: np.ndarray = np.where(count > 0, np.ceil(count / replicas) / np.maximum(count, 1), 1 / replicas)
    return part


def routed_both_ways(routed_bytes: ArrayLike, repeats: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a microbatch to experts and back, in the forward and in the backward.

    A token's activations go to the replica of its expert and the result comes back, in the backward the
    gradients of both: four all-to-alls (GShard, arXiv 2006.16868, section 3.2).  Of d replicas (d - 1) / d of
    the tokens leave theirs where experts have as many each.

    Args:
        routed_bytes: of layers, of one microbatch.
        repeats: whether each layer repeats its forward for the backward.
    """
    once = 2 * np.asarray(routed_bytes, dtype=float)
    return once, once * np.add(1, repeats)


def repeated_layers(layers: int, recompute: int) -> np.ndarray:
    """(L,) whether each layer repeats its forward for the backward: every ``recompute``-th; 0: none."""
    numbers = np.arange(1, layers + 1)
    return numbers % recompute == 0 if recompute else np.zeros(layers, dtype=bool)


def recomputed_bytes(
    kept: np.ndarray, repeated: np.ndarray, outputs: np.ndarray, recompute: int
) -> tuple[np.ndarray, np.ndarray]:
    """Activations that each layer keeps, and those of its own backward, where some repeat their forwards.

    One that does keeps its input. So may the one after it, whose input counts with the layer that has made
    it where that keeps it, too.

    Args:
        kept: bytes of each layer that repeats nothing, shape (..., L).
        repeated: the same of its backward.
        outputs: bytes of each layer's output.
        recompute: as of :func:`repeated_layers`.
    """
    again = repeated_layers(kept.shape[-1], recompute)
    inputs = np.concatenate([np.zeros_like(outputs[..., :1]), outputs[..., :-1]], axis=-1)
    after = np.concatenate([[False], again[:-1]])
    return np.where(again, inputs, kept + after * inputs), np.maximum(repeated, again * kept)


def zero_shares(zero_stage: int, replicas: int) -> tuple[int, int, int]:
    """Number of replicas that have a part each of the optimizer's state, the gradients and the weights."""
    first, second, third = (replicas if zero_stage >= stage else 1 for stage in (1, 2, 3))
    return first, second, third


MOST_BYTES = 4e18
"""Most bytes of one layer: sums over all layers, microbatches and replicas stay finite."""

_Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
_Bytes = Annotated[float, Field(ge=0, le=MOST_BYTES)]


class ProfiledLayer(Settings):
    """One layer, or ``repeat`` equal ones; seconds and bytes of one microbatch."""

    name: str = Field("", max_length=253)
    """Name for people."""
    repeat: int = Field(1, ge=1, le=100_000)
    """Number of such layers that follow each other."""
    forward_seconds: _Seconds
    """Seconds of its forward."""
    backward_seconds: _Seconds
    """Seconds of its backward."""
    optimizer_seconds: _Seconds = 0.0
    """Seconds of one update; no part of a plan, since it does not depend on the partition."""
    held_bytes: _Bytes = 0.0
    """Parameters, gradients and optimizer state."""
    weight_bytes: _Bytes = 0.0
    """The parameters alone; every further weight version costs them again."""
    expert_bytes: _Bytes = 0.0
    """Bytes of experts' weights, of which each replica has a part."""
    experts: int = Field(0, ge=0, le=1_000_000)
    """Number of these; 0: not known, they divide evenly."""
    routed_bytes: _Bytes = 0.0
    """Sent to experts, and back."""
    activation_bytes: _Bytes = 0.0
    """Kept for the backward, of each microbatch in flight."""
    repeated_bytes: _Bytes = 0.0
    """Kept by a repeated forward while the layer's backward runs."""
    gradient_bytes: _Bytes = 0.0
    """Gradients that flow into the layer's weights: kept while its backward runs, and between the halves of
    a split one."""
    output_bytes: _Bytes = 0.0
    """Sent to the next layer."""
    overhead_seconds: _Seconds = 0.0
    """The part of forward and backward that a microbatch costs whatever its size."""
    reduced_bytes: _Bytes | None = None
    """All-reduced by tensor parallelism, both ways; absent: four outputs, a transformer's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        whole = self.forward_seconds + self.backward_seconds
        if self.overhead_seconds > whole:
            reason = f"{self.overhead_seconds} is more than the {whole} s of forward and backward"
            raise ContractError(Problem("overheadSeconds", f"{reason}, of which it is a part"))
        if self.expert_bytes > self.weight_bytes:
            reason = f"{self.expert_bytes} is more than the {self.weight_bytes} of weightBytes"
            raise ContractError(Problem("expertBytes", f"{reason}, of which it is a part"))
        return self

    def shared_by(
        self, replicas: int, *, gradients: int = 1, weights: int = 1, experts: int = 1
    ) -> "ProfiledLayer":
        """The layer on the fullest of some replicas that share its optimizer's state (ZeRO-1) alike.

        ``gradients`` and ``weights``: how many share these, too (ZeRO-2 and 3); ``experts``: its experts.
        """
        of, part = self.expert_bytes, float(fullest_part(self.experts, experts))
        held = held_by_replica(
            self.held_bytes,
            self.weight_bytes,
            replicas,
            gradients,
            weights,
            expert_bytes=of,
            expert_part=part,
        )
        own = self.weight_bytes - of + of * part
        return self.replace(held_bytes=float(held), weight_bytes=own, expert_bytes=of * part)

    def of_samples(self, ratio: float) -> "ProfiledLayer":
        """The layer, of microbatches of ``ratio`` times as many samples; their overhead stays what it is."""
        whole = self.forward_seconds + self.backward_seconds
        longer = (ratio * (whole - self.overhead_seconds) + self.overhead_seconds) / whole if whole else 1.0
        forward, backward = longer * self.forward_seconds, longer * self.backward_seconds
        passing = ("activation", "repeated", "gradient", "output", "routed", "reduced")
        sizes = {f"{name}_bytes": getattr(self, f"{name}_bytes") for name in passing}
        return self.replace(
            forward_seconds=forward,
            backward_seconds=backward,
            overhead_seconds=min(self.overhead_seconds, forward + backward),
            **{name: ratio * size for name, size in sizes.items() if size is not None},
        )

    @property
    def exchanged_bytes(self) -> float:
        """All-reduced by tensor parallelism, both ways."""
        return 4 * self.output_bytes if self.reduced_bytes is None else self.reduced_bytes

    def step_seconds(self, microbatches: int) -> float:
        """Seconds of a step, as a rebalance weighs them: the optimizer included."""
        return microbatches * (self.forward_seconds + self.backward_seconds) + self.optimizer_seconds


_BYTES = ("weight_bytes", "activation_bytes", "output_bytes", "gradient_bytes", "repeated_bytes")
"""Bytes of a layer besides what it holds; a report has them by layer, with ``layer_`` before the name."""
_BY_LAYER = (
    "layer_forward_seconds",
    "layer_optimizer_seconds",
    "layer_bytes",
    *(f"layer_{name}" for name in _BYTES),
)


class ProfileFile(Model):
    """Either ``layers``, or ``layerSeconds`` and its siblings of a report, which are of one step.

    Of one of ``tensor`` GPUs that share each layer.
    """

    microbatch_size: int = Field(1, ge=1)
    tensor: int = Field(1, ge=1)
    layers: tuple[ProfiledLayer, ...] = ()
    layer_seconds: tuple[_Seconds, ...] = ()
    layer_forward_seconds: tuple[_Seconds, ...] = ()
    layer_optimizer_seconds: tuple[_Seconds, ...] = ()
    layer_bytes: tuple[_Bytes, ...] = ()
    layer_weight_bytes: tuple[_Bytes, ...] = ()
    layer_activation_bytes: tuple[_Bytes, ...] = ()
    layer_output_bytes: tuple[_Bytes, ...] = ()
    layer_gradient_bytes: tuple[_Bytes, ...] = ()
    layer_repeated_bytes: tuple[_Bytes, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.layers) == bool(self.layer_seconds):
            raise ContractError("give either layers, or layerSeconds (as a job's report has them)")
        for name in _BY_LAYER:
            values = getattr(self, name)
            if values and len(values) != len(self.layer_seconds):
                reason = f"{len(values)} {camel(name)} for {len(self.layer_seconds)} layerSeconds"
                raise ContractError(Problem(camel(name), f"{reason}. To fix: give one for each layer"))
        return self

    @property
    def assumed_split(self) -> bool:
        """True where forward and backward are not measured apart: a third and two thirds are taken."""
        return not self.layers and not self.layer_forward_seconds

    def each_layer(self, microbatches: int) -> tuple[ProfiledLayer, ...]:
        """Layers one by one; a report's seconds are per step of ``microbatches``."""
        if self.layers:
            return tuple(layer for layer in self.layers for _ in range(layer.repeat))
        nothing = (0.0,) * len(self.layer_seconds)
        updates = self.layer_optimizer_seconds or nothing
        rest = [
            max(0.0, seconds - update) for seconds, update in zip(self.layer_seconds, updates, strict=True)
        ]
        forwards = self.layer_forward_seconds or [seconds / 3 for seconds in rest]
        rows = zip(
            forwards,
            rest,
            updates,
            self.layer_bytes or nothing,
            *(getattr(self, f"layer_{name}") or nothing for name in _BYTES),
            strict=True,
        )
        return tuple(
            ProfiledLayer(
                forward_seconds=forward / microbatches,
                backward_seconds=max(0.0, seconds - forward) / microbatches,
                optimizer_seconds=update,
                held_bytes=held,
                weight_bytes=weights,
                activation_bytes=activations,
                output_bytes=output,
                gradient_bytes=gradients,
                repeated_bytes=repeated,
            )
            for forward, seconds, update, held, weights, activations, output, gradients, repeated in rows
        )

    def profile(self, microbatches: int) -> LayerProfile:
        """Profile for the pipeline planner."""
        return LayerProfile.of(self.each_layer(microbatches))


def read_profile(value: Any) -> ProfileFile:
    """A profile from what JSON or YAML has.

    Other fields of a report are ignored, so that one can be given as it is; those of a layer are not.

    Raises:
        ContractError: it is no profile; every problem is named.
    """
    if isinstance(value, Mapping):
        known = {camel(name) for name in ProfileFile.model_fields}
        value = {key: item for key, item in value.items() if key in known}
    return decode(ProfileFile, value)
