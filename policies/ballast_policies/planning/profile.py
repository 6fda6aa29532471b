"""The input of a plan: measured layers, and the GPUs to plan for."""

import dataclasses

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
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    held_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    overhead_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.overhead_seconds:
            object.__setattr__(self, "overhead_seconds", (0.0,) * len(self.forward_seconds))
        lengths = {field.name: len(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if len(set(lengths.values())) != 1 or not self.forward_seconds:
            raise PlanningError(f"every layer needs every value, the counts are: {lengths}")

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
