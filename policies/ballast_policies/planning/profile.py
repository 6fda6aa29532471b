"""The input of a plan: measured layers, and the GPUs to plan for."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from ballast_policies.planning.memory.measured_layers import MeasuredLayer
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

    def __post_init__(self) -> None:
        for name in ("overhead_seconds", "repeated_bytes", "gradient_bytes"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * len(self.forward_seconds))
        lengths = {field.name: len(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if len(set(lengths.values())) != 1 or not self.forward_seconds:
            raise PlanningError(f"every layer needs every value, the counts are: {lengths}")

    @classmethod
    def of(cls, layers: Sequence[object]) -> Self:
        """From layers that have a value of each field's name."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: tuple(getattr(layer, name) for layer in layers) for name in names})

    @property
    def rows(self) -> tuple[MeasuredLayer, ...]:
        """Bytes of the layers, one by one."""
        names = [field.name for field in dataclasses.fields(MeasuredLayer)]
        columns = zip(*(getattr(self, name) for name in names), strict=True)
        return tuple(MeasuredLayer(**dict(zip(names, values, strict=True))) for values in columns)

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
