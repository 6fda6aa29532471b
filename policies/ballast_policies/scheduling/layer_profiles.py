"""Measurements that trainers made of their layers, by kind of training within a namespace.

A namespace is told only what its own jobs have reported: a report decides where other jobs may not run.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ballast_policies.contract import Report
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.partition import Partition
from ballast_policies.scheduling.gang_spec import GangSpec, JobKey, digest
from ballast_policies.throughput.by_size import rounded

PROFILES_KEPT = 200
"""Kinds whose layers are remembered when their jobs are gone; the oldest go first."""

MOST_LAYERS = 4096
"""Of a longer model nothing is kept."""

DIGITS = 3
"""Of bytes: measurements differ in their last digits, and what is known already is not computed again."""


FRESH_STEPS = 50
"""Of a model that changes while it trains: steps up to which its seconds tell those of a new job."""


@dataclasses.dataclass(frozen=True, slots=True)
class KindProfile:
    """Layers of a kind, by the newest ``job`` that reported; their bytes are the largest so far."""

    job: JobKey
    layers: MeasuredLayers


class LayerProfiles:
    """The newest job's measurements of each kind, the kind with the newest report last."""

    def __init__(self) -> None:
        self.profiles: dict[str, KindProfile] = {}
        self._needs: dict[str, dict[Partition | None, MemoryNeed]] = {}
        self._seconds: dict[JobKey, tuple[float, ...]] = {}
        self._names: dict[JobKey, tuple[GangSpec, str]] = {}

    def restore(self, profiles: Mapping[str, KindProfile]) -> None:
        """Start from what an earlier operator knew."""
        self.profiles, self._needs = dict(profiles), {}

    def record(self, key: JobKey, spec: GangSpec, report: Report, *, several_pools: bool = False) -> None:
        """Take in the layers of the job's newest report, made in the plan that is in force.

        ``several_pools``: each layer's seconds are those of the GPU that had it.
        """
        count = len(report.layer_bytes)
        if not _measured_alike(spec) or not 0 < count <= MOST_LAYERS or spec.layers not in (None, count):
            return
        seconds = rounded(report.layer_seconds) if len(report.layer_seconds) == count else ()
        if several_pools:
            seconds = ()
        reported = {name: getattr(report, field) for name, field in BYTES.items()}
        layers = MeasuredLayers(
            seconds=seconds,
            **{n: tuple(map(_rounded, each)) if len(each) == count else () for n, each in reported.items()},
        )
        name = self._name(key, spec)
        before = self.profiles.pop(name, None)
        if before is not None and before.job == key:
            layers = _largest(before.layers, layers)
        if before is not None and not (seconds and (not spec.config.dynamics or report.step <= FRESH_STEPS)):
            layers = dataclasses.replace(layers, seconds=before.layers.seconds or seconds)
        if before is None or _bytes_of(before.layers) != _bytes_of(layers):
            self._needs.pop(name, None)
        self.profiles[name] = KindProfile(key, layers)
        if seconds:
            self._seconds[key] = seconds

    def need(self, key: JobKey, spec: GangSpec) -> MemoryNeed | None:
        """Memory need measured of jobs of this kind; None: none has been measured."""
        if not self.profiles or not _measured_alike(spec):
            return None
        name = self._name(key, spec)
        if name not in self.profiles:
            return None
        needs, cut = self._needs.setdefault(name, {}), spec.planned_cut
        if cut not in needs:
            needs[cut] = MemoryNeed(self.profiles[name].layers, spec.pipeline_form(), cut)
        return needs[cut]

    def layers(self, key: JobKey, spec: GangSpec) -> MeasuredLayers | None:
        """Profile of the job's layers for its next launch, its own seconds first; None: nothing is known."""
        if not self.profiles or not _measured_alike(spec):
            return None
        found = self.profiles.get(self._name(key, spec))
        if found is None:
            return None
        own = self._seconds.get(key, ())
        return dataclasses.replace(found.layers, seconds=own) if own else found.layers

    def keep(self, keys: Iterable[JobKey]) -> None:
        """Forget the names of all other jobs, and the oldest kinds."""
        wanted = set(keys)
        for gone in [key for key in self._names if key not in wanted]:
            del self._names[gone]
            self._seconds.pop(gone, None)
        for name in list(self.profiles)[:-PROFILES_KEPT]:
            del self.profiles[name]
            self._needs.pop(name, None)

    def _name(self, key: JobKey, spec: GangSpec) -> str:
        known = self._names.get(key)
        if known is None or known[0] is not spec:
            known = self._names[key] = (spec, _kind_in(key[0], spec))
        return known[1]


def _measured_alike(spec: GangSpec) -> bool:
    """True if its layers are alike in each launch: not those of a script, nor with degrees by its GPUs."""
    return not spec.is_script and not spec.is_planned


def _kind_in(namespace: str, spec: GangSpec) -> str:
    """Equal for jobs of a namespace whose layers take as many bytes on a rank."""
    fields = spec.config_fields
    training = fields.get("training") or {}
    pipeline: dict[str, Any] = fields["pipeline"]
    parts = [
        namespace,
        spec.own_command[0],
        fields["model"],
        fields.get("dynamics"),
        fields.get("parallelism"),
        [training.get(field) for field in ("optimizer", "precision", "dtype", "masterWeights", "recompute")],
        [pipeline.get(field) for field in ("globalBatchSize", "microbatches")],
        [pipeline.get(field) for field in ("schedule", "stagesPerRank", "replicas")],
        # Names in a state that was saved before there was the field stay.
        *([every] if (every := training.get("recomputeEvery") or 1) > 1 else ()),
    ]
    return digest(parts)[:16]


BYTES = {
    "held_bytes": "layer_bytes",
    "weight_bytes": "layer_weight_bytes",
    "activation_bytes": "layer_activation_bytes",
    "output_bytes": "layer_output_bytes",
    "gradient_bytes": "layer_gradient_bytes",
    "repeated_bytes": "layer_repeated_bytes",
}
"""Fields of measured layers that decide what fits -> those of a report."""


def _bytes_of(layers: MeasuredLayers) -> tuple[tuple[int, ...], ...]:
    return tuple(getattr(layers, name) for name in BYTES)


def _largest(before: MeasuredLayers, now: MeasuredLayers) -> MeasuredLayers:
    """``now`` with each layer's largest bytes of both, where both are of as many layers."""
    if len(before.held_bytes) != len(now.held_bytes):
        return now
    largest = {}
    for name in BYTES:
        old, new = getattr(before, name), getattr(now, name)
        largest[name] = tuple(map(max, old, new)) if old and new else new or old
    return dataclasses.replace(now, **largest)


def _rounded(count: int) -> int:
    return int(float(f"{count:.{DIGITS}g}"))
