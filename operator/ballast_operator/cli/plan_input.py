"""The two files that ``ballast plan`` reads: a profile of layers, and a description of a cluster."""

from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import click
import numpy as np
import pydantic
import yaml
from ballast_policies.planning.planners import Level
from ballast_policies.planning.planners.amp import DeviceGrid, LayerCost
from ballast_policies.planning.profile import GpuKind, LayerProfile
from pydantic.alias_generators import to_camel

Positive = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
Model = TypeVar("Model", bound=pydantic.BaseModel)
Count = Annotated[int, pydantic.Field(ge=1)]


_BY_LAYER = ("layer_forward_seconds", "layer_optimizer_seconds", "layer_bytes", "layer_activation_bytes")


class _Input(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class LayerInput(_Input):
    """One layer, or ``repeat`` equal ones; seconds and bytes of one microbatch."""

    name: str = ""
    repeat: Count = 1
    forward_seconds: NotNegative
    backward_seconds: NotNegative
    held_bytes: NotNegative = 0
    weight_bytes: NotNegative = 0
    activation_bytes: NotNegative = 0
    output_bytes: NotNegative = 0
    optimizer_seconds: NotNegative = 0
    """Of one step; part of a profile, no part of the plan: it does not depend on the cut."""
    reduced_bytes: NotNegative | None = None
    """All-reduced by tensor parallelism, both ways together; None: four outputs, as in a transformer."""


class ProfileInput(pydantic.BaseModel):
    """Either ``layers``, or the ``layerSeconds`` and its siblings of a running job's report.

    Other fields of a report are ignored, so that one can be fed in as it is.
    """

    model_config = pydantic.ConfigDict(extra="ignore", alias_generator=to_camel, populate_by_name=True)

    microbatch_size: Count = 1
    layers: list[LayerInput] = []
    layer_seconds: list[NotNegative] = []
    layer_forward_seconds: list[NotNegative] = []
    layer_optimizer_seconds: list[NotNegative] = []
    layer_bytes: list[NotNegative] = []
    layer_activation_bytes: list[NotNegative] = []

    @pydantic.model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.layers) == bool(self.layer_seconds):
            raise ValueError("give either layers, or layerSeconds (as a job's report has them)")
        for field in _BY_LAYER:
            values = getattr(self, field)
            if values and len(values) != len(self.layer_seconds):
                raise ValueError(
                    f"{len(values)} {to_camel(field)} for {len(self.layer_seconds)} layerSeconds"
                )
        return self

    @property
    def assumed_split(self) -> bool:
        """True where forward and backward are not measured apart: a third and two thirds are taken."""
        return not self.layers and not self.layer_forward_seconds

    def each_layer(self, microbatches: int) -> list[LayerInput]:
        """Layers one by one; a report's seconds are per step of ``microbatches``."""
        if self.layers:
            return [layer for layer in self.layers for _ in range(layer.repeat)]
        nothing = [0.0] * len(self.layer_seconds)
        held, kept = self.layer_bytes or nothing, self.layer_activation_bytes or nothing
        updates = self.layer_optimizer_seconds or nothing
        learning = [
            max(0.0, seconds - update) for seconds, update in zip(self.layer_seconds, updates, strict=True)
        ]
        forwards = self.layer_forward_seconds or [seconds / 3 for seconds in learning]
        return [
            LayerInput(
                forward_seconds=forward / microbatches,
                backward_seconds=max(0.0, seconds - forward) / microbatches,
                optimizer_seconds=update,
                held_bytes=size,
                activation_bytes=activation,
            )
            for forward, seconds, update, size, activation in zip(
                forwards, learning, updates, held, kept, strict=True
            )
        ]

    def profile(self, microbatches: int) -> LayerProfile:
        """For the pipeline planner."""
        layers = self.each_layer(microbatches)
        return LayerProfile(
            forward_seconds=tuple(layer.forward_seconds for layer in layers),
            backward_seconds=tuple(layer.backward_seconds for layer in layers),
            held_bytes=tuple(layer.held_bytes for layer in layers),
            weight_bytes=tuple(layer.weight_bytes for layer in layers),
            activation_bytes=tuple(layer.activation_bytes for layer in layers),
            output_bytes=tuple(layer.output_bytes for layer in layers),
        )

    def costs(self, microbatches: int) -> list[LayerCost]:
        """For AMP: of one sample."""
        size = self.microbatch_size
        return [
            LayerCost(
                seconds=(layer.forward_seconds + layer.backward_seconds) / size,
                weight_bytes=layer.weight_bytes,
                output_bytes=layer.output_bytes / size,
                reduced_bytes=(4 * layer.output_bytes if layer.reduced_bytes is None else layer.reduced_bytes)
                / size,
            )
            for layer in self.each_layer(microbatches)
        ]


class GpuInput(_Input):
    """Some GPUs of one type; ``speed`` relative to the profile's."""

    type: str
    count: Count
    speed: Positive = 1.0
    memory_bytes: Positive | None = None


class BandwidthInput(_Input):
    """Bytes/s of the two kinds of links."""

    inside_server: Positive
    between_servers: Positive


class ClusterInput(_Input):
    """GPUs in the order in which they fill the servers."""

    gpus: Annotated[list[GpuInput], pydantic.Field(min_length=1)]
    gpus_per_server: Count | None = None
    bandwidth: BandwidthInput | None = None

    @pydantic.model_validator(mode="after")
    def _types_once(self) -> Self:
        types = [gpu.type for gpu in self.gpus]
        twice = sorted({name for name in types if types.count(name) > 1})
        if twice:
            raise ValueError(f"GPU types {twice} are listed twice: give each type once, with its count")
        return self

    @property
    def total(self) -> int:
        """Number of GPUs."""
        return sum(gpu.count for gpu in self.gpus)

    def kinds(self, most: int | None = None) -> list[GpuKind]:
        """All GPUs, or the ``most`` fastest."""
        left = self.total if most is None else most
        kinds = []
        for gpu in sorted(self.gpus, key=lambda gpu: -gpu.speed):
            count = min(gpu.count, left)
            left -= count
            if count:
                kinds.append(
                    GpuKind(gpu_type=gpu.type, count=count, speed=gpu.speed, memory_bytes=gpu.memory_bytes)
                )
        return kinds

    def pipeline_bandwidth(self, gpus: int) -> float | None:
        """Between neighbouring ranks: the slow links, where not all are in one server."""
        if self.bandwidth is None:
            return None
        one_server = self.gpus_per_server is None or gpus <= self.gpus_per_server
        return self.bandwidth.inside_server if one_server else self.bandwidth.between_servers

    def levels(self) -> list[Level]:
        """For PipeDream: GPUs of a server, then servers."""
        network = self._network()
        per_server, servers = self._servers()
        return [
            Level(components=per_server, bandwidth=network.inside_server),
            Level(components=servers, bandwidth=network.between_servers),
        ]

    def grid(self) -> DeviceGrid:
        """For AMP: a column a server."""
        network = self._network()
        rows, columns = self._servers()
        speeds = np.repeat([gpu.speed for gpu in self.gpus], [gpu.count for gpu in self.gpus])
        server = np.arange(rows * columns) % columns
        same = server[:, None] == server[None, :]
        memory = [gpu.memory_bytes for gpu in self.gpus if gpu.memory_bytes is not None]
        return DeviceGrid(
            rows=rows,
            columns=columns,
            speeds=tuple(speeds.reshape(columns, rows).T.ravel().tolist()),
            bandwidth=np.where(same, network.inside_server, network.between_servers).astype(float),
            memory_bytes=min(memory, default=None),
        )

    def _network(self) -> BandwidthInput:
        if self.bandwidth is None:
            raise click.ClickException(
                "this planner weighs transfers. To fix: give the cluster "
                "`bandwidth: {insideServer: ..., betweenServers: ...}` in bytes/s"
            )
        return self.bandwidth

    def _servers(self) -> tuple[int, int]:
        per_server = self.gpus_per_server or self.total
        if self.total % per_server:
            raise click.ClickException(
                f"{self.total} GPUs do not fill servers of {per_server}. To fix: change gpusPerServer"
            )
        return per_server, self.total // per_server


def read_profile(path: Path) -> ProfileInput:
    """Read YAML or JSON.

    Raises:
        ClickException: it cannot be read; the text names the field and the reason.
    """
    return _read(path, ProfileInput)


def read_cluster(path: Path) -> ClusterInput:
    """Read YAML or JSON.

    Raises:
        ClickException: it cannot be read; the text names the field and the reason.
    """
    return _read(path, ClusterInput)


def _read(path: Path, model: type[Model]) -> Model:
    try:
        content: Any = yaml.safe_load(path.read_text())
        return model.model_validate(content)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.ClickException(f"{path}: neither YAML nor JSON: {error}") from error
    except pydantic.ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()
        )
        raise click.ClickException(f"{path}: {reasons}") from error
