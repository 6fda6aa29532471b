"""Terms of AMP: layers, a cluster of unlike devices and links, and a strategy (AMP, NeurIPS 2022)."""

import dataclasses

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer at speed 1.

    Attributes:
        seconds: forward and backward of one sample.
        overhead_seconds: of each microbatch besides, whatever its size (kernel launches).
        weight_bytes: its parameters.
        output_bytes: activations of one sample that the next layer needs.
        reduced_bytes: of one sample, all-reduced inside a tensor-parallel group, both ways together.
        held_bytes: weights, gradients and optimizer state; None: four times the weights.
        activation_bytes: of one sample, kept for the backward; None: its output.
        repeated_bytes, gradient_bytes: of one sample, while its backward runs; as of a profile.
    """

    seconds: float
    overhead_seconds: float = 0.0
    weight_bytes: float = 0.0
    output_bytes: float = 0.0
    reduced_bytes: float = 0.0
    held_bytes: float | None = None
    activation_bytes: float | None = None
    repeated_bytes: float = 0.0
    gradient_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrid:
    """Devices as a grid, fastest links down the columns; device number = row * columns + column.

    Attributes:
        rows, columns: e.g. GPUs of a server, servers.
        speeds: relative, by device.
        bandwidth: bytes/s between devices, shape (n, n), symmetric; the diagonal is not used.
        memory_bytes: of every device, or by device; None: not limited.

    Raises:
        PlanningError: shapes that do not match, or a speed or bandwidth that is not above 0.
    """

    rows: int
    columns: int
    speeds: tuple[float, ...]
    bandwidth: np.ndarray
    memory_bytes: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        n = self.devices
        if len(self.speeds) != n or self.bandwidth.shape != (n, n):
            raise PlanningError(
                f"a grid of {self.rows} x {self.columns} needs {n} speeds and {n} x {n} bandwidths, got "
                f"{len(self.speeds)} and {self.bandwidth.shape}"
            )
        if isinstance(self.memory_bytes, tuple) and len(self.memory_bytes) != n:
            raise PlanningError(f"memory of {len(self.memory_bytes)} devices does not fit a grid of {n}")
        off_diagonal = self.bandwidth[~np.eye(n, dtype=bool)]
        if min(self.speeds) <= 0 or (off_diagonal <= 0).any():
            raise PlanningError("speeds and bandwidths must be above 0")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.rows * self.columns

    def memory(self, device: int) -> float:
        """Bytes that the device holds; infinite where it is not limited."""
        if isinstance(self.memory_bytes, tuple):
            return self.memory_bytes[device]
        return float("inf") if self.memory_bytes is None else self.memory_bytes

    def slowest_link(self, devices: tuple[int, ...]) -> float:
        """Least bandwidth within a group; infinite for a single device."""
        pairs = [self.bandwidth[a, b] for i, a in enumerate(devices) for b in devices[i + 1 :]]
        return float(min(pairs, default=np.inf))


Placement = tuple[tuple[tuple[int, ...], ...], ...]
"""By stage, by data-parallel replica, the devices of its tensor-parallel group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A whole plan.

    Attributes:
        tensor, data, pipeline: degrees; their product is the devices.
        microbatch_size: samples of a microbatch in one replica.
        placement: devices.
        partition: layers to stages.
    """

    tensor: int
    data: int
    pipeline: int
    microbatch_size: int
    placement: Placement
    partition: Partition
