"""The two files that ``ballast plan`` reads: a profile of layers, and a description of a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import click
import pydantic
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import FILE
from ballast_policies.contract.yaml_text import parse_yaml
from ballast_policies.gpus.catalogue import gpu_named
from ballast_policies.planning import gpu_profiles
from ballast_policies.planning.gpu_profiles import GpuProfiles
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.answers import FoundPlan
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import Devices, Layout, PlacedStage, devices_of
from ballast_policies.planning.profile import GpuKind, ProfiledLayer, ProfileFile
from ballast_policies.planning.profile import read_profile as profile_from
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE
from pydantic.alias_generators import to_camel

Positive = Annotated[float, pydantic.Field(gt=0)]
Speed = Annotated[float, pydantic.Field(ge=1e-9, le=1e9)]
Model = TypeVar("Model", bound=pydantic.BaseModel)
Count = Annotated[int, pydantic.Field(ge=1)]

MOST_GPUS = 4096
"""GPUs that the planners weigh in two minutes; each link between two is a number in memory."""

MOST_LAYERS = 2000
"""Layers of a model; ``best`` and ``amp`` hold a number for each two of them."""


class _Input(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class GpuInput(_Input):
    """Some GPUs of one type; ``speed`` relative to the profile's. Memory: see :meth:`known_memory`."""

    type: str
    count: Count
    speed: Speed = 1.0
    memory_bytes: Positive | None = None

    def kind(self, count: int) -> GpuKind:
        """``count`` of them."""
        return GpuKind(gpu_type=self.type, count=count, speed=self.speed, memory_bytes=self.known_memory)

    @property
    def from_catalogue(self) -> bool:
        """The memory is not stated, and the catalogue has the type."""
        return "memory_bytes" not in self.model_fields_set and gpu_named(self.type) is not None

    @property
    def known_memory(self) -> float | None:
        """Bytes, as stated, else of the catalogue; None: not limited (a stated null, or an unknown type)."""
        found = gpu_named(self.type) if self.from_catalogue else None
        return self.memory_bytes if found is None else found.memory_bytes


class TypeLinks(_Input):
    """Bytes/s inside the servers of one GPU type, or between servers of one or two."""

    gpus: Annotated[list[str], pydantic.Field(min_length=1, max_length=2)]
    inside_server: Positive | None = None
    between_servers: Positive | None = None

    @pydantic.model_validator(mode="after")
    def _inside_is_of_one(self) -> Self:
        if self.inside_server is not None and len(self.gpus) > 1:
            raise ValueError(f"insideServer is of one GPU type, not of {self.gpus}: give each its own entry")
        return self


class BandwidthInput(_Input):
    """Bytes/s of the two kinds of links; ``byType``: of types whose links are others."""

    inside_server: Positive
    between_servers: Positive
    by_type: list[TypeLinks] = []

    @pydantic.model_validator(mode="after")
    def _each_once(self) -> Self:
        known: set[tuple[str, tuple[str, ...]]] = set()
        for links in self.by_type:
            for field in sorted(links.model_fields_set - {"gpus"}):
                key = field, tuple(sorted({*links.gpus}))
                if key in known:
                    raise ValueError(f"byType states {to_camel(field)} of {links.gpus} twice: leave one out")
                known.add(key)
        return self


class ClusterInput(_Input):
    """GPUs in the order in which they fill the servers."""

    gpus: Annotated[list[GpuInput], pydantic.Field(min_length=1)]
    gpus_per_server: Count | None = None
    bandwidth: BandwidthInput | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.total > MOST_GPUS:
            raise ValueError(f"{self.total} GPUs are more than the {MOST_GPUS} planned over: plan for a part")
        types = [gpu.type for gpu in self.gpus]
        twice = sorted({name for name in types if types.count(name) > 1})
        if twice:
            raise ValueError(f"GPU types {twice} are listed twice: give each type once, with its count")
        linked = (
            {name for links in self.bandwidth.by_type for name in links.gpus} if self.bandwidth else set()
        )
        if linked - set(types):
            unknown = sorted(linked - set(types))
            raise ValueError(f"bandwidth.byType has links of {unknown}: name types of gpus, {types}")
        return self

    @property
    def total(self) -> int:
        """Number of GPUs."""
        return sum(gpu.count for gpu in self.gpus)

    def kinds(self, most: int | None = None) -> list[GpuKind]:
        """The GPUs, or the ``most`` fastest."""
        left = self.total if most is None else most
        kinds = []
        for gpu in sorted(self.gpus, key=lambda gpu: -gpu.speed):
            count = min(gpu.count, left)
            left -= count
            if count:
                kinds.append(gpu.kind(count))
        return kinds

    def from_catalogue(self) -> dict[str, float]:
        """Types whose memory is the catalogue's -> bytes."""
        return {gpu.type: gpu.known_memory or 0.0 for gpu in self.gpus if gpu.from_catalogue}

    def pipeline_bandwidth(self, gpus: int) -> float | None:
        """Bandwidth between neighbouring ranks: that of slow links, where not all are in one server."""
        if self.bandwidth is None:
            return None
        one_server = self.gpus_per_server is None or gpus <= self.gpus_per_server
        return self.bandwidth.inside_server if one_server else self.bandwidth.between_servers

    def devices(self) -> Devices:
        """The GPUs in the order in which they fill the servers."""
        links = self.bandwidth
        by_type = () if links is None else links.by_type
        return devices_of(
            [gpu.kind(gpu.count) for gpu in self.gpus],
            gpus_per_server=self.gpus_per_server,
            inside=float("inf") if links is None else links.inside_server,
            between=float("inf") if links is None else links.between_servers,
            inside_of={of.gpus[0]: of.inside_server for of in by_type if of.inside_server},
            between_of={
                (min(of.gpus), max(of.gpus)): of.between_servers for of in by_type if of.between_servers
            },
        )

    def measured_by(self, profiles: GpuProfiles) -> "ClusterInput":
        """The cluster with the types' speeds as profiles tell them.

        Raises:
            PlanningError: a type has no profile, or a speed of its own.
        """
        profiles.check([gpu.type for gpu in self.gpus], profiles.layers)
        for gpu in self.gpus:
            if "speed" in gpu.model_fields_set:
                raise PlanningError(
                    f"GPU type {gpu.type} has speed {gpu.speed:g} and a profile. To fix: leave the speed out"
                )
        gpus = [gpu.model_copy(update={"speed": profiles.speed(gpu.type)}) for gpu in self.gpus]
        return self.model_copy(update={"gpus": gpus})


class _Given(_Input):
    """A part of a plan; what is predicted of it is ignored."""

    model_config = pydantic.ConfigDict(extra="ignore")


class _GivenStage(_Given):
    first_layer: Annotated[int, pydantic.Field(ge=0)]
    end_layer: Count
    gpus: Annotated[list[Annotated[list[int], pydantic.Field(min_length=1)]], pydantic.Field(min_length=1)]


class _GivenParallelism(_Given):
    zero_stage: Annotated[int, pydantic.Field(ge=0, le=3)] = 0


class _GivenJob(_Given):
    parallelism: _GivenParallelism = _GivenParallelism()


class GivenPlan(_Given):
    """A plan as ``--output json`` prints it."""

    stages: Annotated[list[_GivenStage], pydantic.Field(min_length=1)]
    microbatch_size: Count
    microbatches: Count
    recompute: bool = False
    recompute_every: Annotated[int, pydantic.Field(ge=1, le=MOST_LAYERS)] = 1
    schedule: str = DEFAULT_SCHEDULE
    job: _GivenJob = _GivenJob()


def step_microbatches(profile: ProfileFile, microbatches: int, batch_size: int | None) -> int:
    """Microbatches of the profile's size in a step. Raises PlanningError: they do not divide the batch."""
    if batch_size is None:
        return microbatches
    if batch_size % profile.microbatch_size:
        raise PlanningError(
            f"a batch of {batch_size} is not a multiple of the profile's microbatchSize of "
            f"{profile.microbatch_size}. To fix: choose a multiple"
        )
    return batch_size // profile.microbatch_size


def known_tensor(profile: ProfileFile, cluster: ClusterInput) -> int:
    """Any tensor-parallel degree, where profile and cluster tell what its all-reduces cost; else 1."""
    known = cluster.bandwidth is not None and all(bytes_ > 0 for bytes_ in reduced_bytes(profile, 1))
    return cluster.total if known else 1


def reduced_bytes(profile: ProfileFile, microbatches: int) -> tuple[float, ...]:
    """Bytes by layer that tensor parallelism all-reduces for one microbatch, both ways together."""
    return tuple(layer.exchanged_bytes for layer in profile.each_layer(microbatches))


def read_profile(path: Path) -> ProfileFile:
    """Read YAML or JSON. Raises ClickException: it cannot be read, or is of parts of layers."""
    try:
        profile = profile_from(_content(path))
    except ContractError as error:
        raise click.ClickException(f"{path}: {error}") from error
    layers = sum(layer.repeat for layer in profile.layers) or len(profile.layer_seconds)
    if layers > MOST_LAYERS:
        reason = f"{layers} layers are more than the {MOST_LAYERS} that are planned"
        raise click.ClickException(f"{path}: {reason}. To fix: give neighbouring layers as one")
    if profile.tensor > 1:
        reason = f"tensor: {profile.tensor} has a GPU's part of each layer, plans are of whole ones"
        raise click.ClickException(
            f"{path}: {reason}. To fix: measure with parallelism.tensor 1, or give it as --profiles"
        )
    return profile


def read_gpu_profiles(paths: Sequence[Path]) -> GpuProfiles:
    """Read files, and those of folders whose names end as JSON or YAML do.

    Raises:
        ClickException: the text names the file, the field, the value and what to change.
    """
    found: dict[gpu_profiles.Key, tuple[ProfiledLayer, ...]] = {}
    files = [file for path in paths for file in (_in_folder(path) if path.is_dir() else [path])]
    for file in files:
        try:
            of_file = gpu_profiles.read_gpu_profiles(file.stem, _content(file))
        except ContractError as error:
            raise click.ClickException(f"{file}: {error}") from error
        for gpu_type, tensor, size in set(of_file) & set(found):
            raise click.ClickException(
                f"{file}: {gpu_type} at tensor degree {tensor}, microbatch {size} is in two files. "
                "To fix: give the files of one model"
            )
        found |= of_file
    if not found:
        raise click.ClickException(f"--profiles: no profile in {', '.join(map(str, paths))}")
    try:
        return GpuProfiles(found)
    except PlanningError as error:
        raise click.ClickException(f"--profiles: {error}") from error


def _in_folder(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in (".json", ".yaml", ".yml"))


def read_given(path: Path) -> GivenPlan:
    """Read a plan: the output of ``--output json``, whose first plan it is, or one of its ``plans``.

    Raises:
        ClickException: it cannot be read.
    """
    value = _content(path)
    if isinstance(value, dict) and isinstance(plans := value.get("plans"), list):
        if not plans:
            raise click.ClickException(
                f"{path}: plans is empty: --planner pipeline lists those of 1F1B alone. To fix: make the "
                "plan without --schedule"
            )
        value = plans[0]
    return _validated(path, GivenPlan, value)


def given_layout(given: GivenPlan, model: CostModel) -> FoundPlan:
    """Plan for the model. Raises ClickException: it is none for the model's layers and GPUs."""
    stages = tuple(
        PlacedStage(first_layer=s.first_layer, end_layer=s.end_layer, groups=tuple(map(tuple, s.gpus)))
        for s in given.stages
    )
    layout = Layout(
        stages=stages,
        microbatch_size=given.microbatch_size,
        microbatches=given.microbatches,
        recompute=given.recompute and given.recompute_every,
    )
    reason = layout.unsuited(model.layers, model.devices.count)
    if reason is not None:
        raise click.ClickException(f"--given: stages: {reason}")
    return FoundPlan(layout, given.schedule)


def read_cluster(path: Path) -> ClusterInput:
    """Read YAML or JSON. Raises ClickException: it cannot be read."""
    return _validated(path, ClusterInput, _content(path))


def read_config(path: Path) -> dict[str, Any]:
    """Read a trainer's configuration, which the trainer checks. Raises ClickException: it is no object."""
    value = _content(path)
    if not isinstance(value, dict):
        raise click.ClickException(f"{path}: no object of fields, as ballast-train --config takes one")
    for field in ("pipeline", "parallelism", "training"):
        if not isinstance(value.get(field) or {}, dict):
            raise click.ClickException(f"{path}: {field}: {value[field]!r:.80} is no object of fields")
    return value


def _validated(path: Path, model: type[Model], value: Any) -> Model:
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()
        )
        raise click.ClickException(f"{path}: {reasons}") from error


def _content(path: Path) -> Any:
    try:
        return parse_yaml(FILE.read(path))
    except ContractError as error:
        raise click.ClickException(f"{path}: neither YAML nor JSON: {error}") from error
