"""What trainers have measured of their layers, by kind of training within a namespace.

A namespace is told only what its own jobs have reported: a report decides where other jobs may not run.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from ballast_policies.planning.launch.memory import MeasuredLayers, MemoryNeed, PipelineForm

from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

PROFILES_KEPT = 200
"""Kinds whose layers are remembered when their jobs are gone; the oldest go first."""

MOST_LAYERS = 4096
"""Of a longer model nothing is kept."""

DIGITS = 3
"""Of bytes: measurements differ in their last digits, and what is known already is not computed again."""


@dataclasses.dataclass(slots=True)
class _Profile:
    """Of a kind.

    Attributes:
        job: whose reports it is made of, the newest that has reported.
        need: its bytes, each layer's largest so far.
    """

    job: Key
    need: MemoryNeed


class LayerProfiles:
    """The newest job's measurements of each kind, the newest kind last."""

    def __init__(self) -> None:
        self._profiles: dict[str, _Profile] = {}
        self._names: dict[Key, tuple[JobSpec, str]] = {}

    def record(self, view: JobView) -> None:
        """Take in the layers of the job's newest report, if it was made in the plan that is in force."""
        lease, plan, spec = view.lease, view.launched_plan, view.spec
        if lease is None or lease.report is None or plan is None or spec is None or spec.is_script:
            return
        report = lease.report
        count = len(report.layer_bytes)
        if report.epoch != plan.epoch or not 0 < count <= MOST_LAYERS or spec.layers not in (None, count):
            return
        kept = report.layer_activation_bytes
        layers = MeasuredLayers(
            held_bytes=tuple(map(_rounded, report.layer_bytes)),
            activation_bytes=tuple(map(_rounded, kept)) if len(kept) == count else (),
        )
        name = self._name(view.key, spec)
        before = self._profiles.pop(name, None)
        if before is not None and before.job == view.key:
            layers = _largest(before.need.layers, layers)
        if before is None or before.need.layers != layers:
            before = _Profile(job=view.key, need=MemoryNeed(layers, _form(spec)))
        before.job = view.key
        self._profiles[name] = before

    def need(self, key: Key, spec: JobSpec) -> MemoryNeed | None:
        """What jobs of this one's kind have been measured to need; None: none has been measured."""
        if not self._profiles or spec.is_script:
            return None
        found = self._profiles.get(self._name(key, spec))
        return found.need if found is not None else None

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget the names of all other jobs, and the oldest kinds."""
        wanted = set(keys)
        for gone in [key for key in self._names if key not in wanted]:
            del self._names[gone]
        for name in list(self._profiles)[:-PROFILES_KEPT]:
            del self._profiles[name]

    def _name(self, key: Key, spec: JobSpec) -> str:
        known = self._names.get(key)
        if known is None or known[0] is not spec:
            known = self._names[key] = (spec, _kind_in(key[0], spec))
        return known[1]


def _kind_in(namespace: str, spec: JobSpec) -> str:
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
        [training.get(field) for field in ("optimizer", "precision", "recompute")],
        [pipeline.get(field) for field in ("globalBatchSize", "microbatches")],
        [pipeline.get(field) for field in ("schedule", "stagesPerRank", "replicas")],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _form(spec: JobSpec) -> PipelineForm:
    pipeline, parallelism = spec.config.pipeline, spec.config.parallelism
    return PipelineForm(
        schedule=pipeline.schedule,
        positions=1,
        microbatches=max(1, pipeline.microbatches // parallelism.data),
        stages_per_rank=spec.stages_per_rank,
        replicas=spec.replicas,
        optimizer=spec.config.training.optimizer,
    )


def _largest(before: MeasuredLayers, now: MeasuredLayers) -> MeasuredLayers:
    """Each layer's largest bytes of both; ``now`` where they are not of as many layers."""
    if len(before.held_bytes) != len(now.held_bytes):
        return now
    pairs = zip(before.held_bytes, now.held_bytes, strict=True)
    kept = now.activation_bytes or before.activation_bytes
    if before.activation_bytes and now.activation_bytes:
        kept = tuple(map(max, before.activation_bytes, now.activation_bytes))
    return MeasuredLayers(held_bytes=tuple(max(pair) for pair in pairs), activation_bytes=kept)


def _rounded(count: int) -> int:
    return int(float(f"{count:.{DIGITS}g}"))
