"""The two files that ``ballast plan`` reads: a profile of layers, and a description of a cluster."""

from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import click
import numpy as np
import pydantic
import yaml
from ballast_policies.contract.errors import ContractError
from ballast_policies.planning import profile_file
from ballast_policies.planning.planners import Level
from ballast_policies.planning.planners.amp import DeviceGrid, LayerCost
from ballast_policies.planning.profile import GpuKind
from ballast_policies.planning.profile_file import ProfileFile
from pydantic.alias_generators import to_camel

Positive = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
Model = TypeVar("Model", bound=pydantic.BaseModel)
Count = Annotated[int, pydantic.Field(ge=1)]


class _Input(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


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


def layer_costs(profile: ProfileFile, microbatches: int) -> list[LayerCost]:
    """For AMP: the layers' cost of one sample."""
    size = profile.microbatch_size
    return [
        LayerCost(
            seconds=(layer.forward_seconds + layer.backward_seconds) / size,
            weight_bytes=layer.weight_bytes,
            output_bytes=layer.output_bytes / size,
            reduced_bytes=(4 * layer.output_bytes if layer.reduced_bytes is None else layer.reduced_bytes)
            / size,
        )
        for layer in profile.each_layer(microbatches)
    ]


def read_profile(path: Path) -> ProfileFile:
    """Read YAML or JSON.

    Raises:
        ClickException: it cannot be read; the text names the field and the reason.
    """
    try:
        return profile_file.read_profile(_content(path))
    except ContractError as error:
        raise click.ClickException(f"{path}: {error}") from error


def read_cluster(path: Path) -> ClusterInput:
    """Read YAML or JSON.

    Raises:
        ClickException: it cannot be read; the text names the field and the reason.
    """
    return _read(path, ClusterInput)


def _read(path: Path, model: type[Model]) -> Model:
    try:
        return model.model_validate(_content(path))
    except pydantic.ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()
        )
        raise click.ClickException(f"{path}: {reasons}") from error


def _content(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.ClickException(f"{path}: neither YAML nor JSON: {error}") from error
