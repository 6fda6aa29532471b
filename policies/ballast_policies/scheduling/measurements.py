"""Speeds of a job on each GPU type: the policies' estimator, fed with what the cluster says.

The prior of a job's kind is what its spec states and, where it states nothing, what other jobs of the
same kind (model and batches) have reported. A job's own reports take the prior's place, and scale it
elsewhere: a model that got cheaper got cheaper everywhere. Where a kind was never seen on a GPU type,
matrix completion over all kinds says how that type compares (dissertation section 5.3.3). Every
estimate has a deviation, which falls as reports come. Speeds are kept by the number of nodes that a gang was
on: those that policies see are of gangs on as few nodes as the pools allow.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from ballast_policies.contract.messages import Report
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.partition import Partition
from ballast_policies.rounds.gangs import SpreadGang, speeds_where_it_is
from ballast_policies.rounds.values import Placement
from ballast_policies.scheduling.gang_spec import GangSpec, JobKey, digest, job_id
from ballast_policies.scheduling.gang_speeds import (
    NO_NODES,
    GangRequest,
    PackedSpeeds,
    SizeSpeeds,
    as_prior,
    bounded,
    packed_speeds,
    reconcile_with_spec,
    resized,
    rounded,
    speed_on,
    speed_ratio,
    stated,
)
from ballast_policies.scheduling.refusals import each_job
from ballast_policies.scheduling.state import NodeSizes
from ballast_policies.throughput.estimator import Estimator
from ballast_policies.throughput.speeds import Estimate, SpeedKey, Speeds
from ballast_policies.throughput.table import JobType, ThroughputTable

T = TypeVar("T")

PROFILES_KEPT = 200
"""Kinds whose layers are remembered when their jobs are gone; the oldest go first."""

MOST_LAYERS = 4096
"""Layers up to which a model's measurements are kept."""

DIGITS = 3
"""Digits of bytes: measurements differ in their last, and what is known already is not computed again."""


FRESH_STEPS = 50
"""Steps up to which the seconds of a model that changes while it trains tell those of a new job."""


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


KINDS_KEPT = 100
"""Kinds of training whose measured speeds are remembered when their jobs are gone; the oldest go first."""

NOT_SEEN = Estimate(steps_per_second=0.0, deviation=math.inf, source="unknown")


@dataclasses.dataclass(slots=True)
class Measured:
    """Speeds that one job has reported."""

    launch: int = 0
    step: int = -1
    speeds: dict[SpeedKey, Estimate] = dataclasses.field(default_factory=dict)


class Measurements:
    """Reports of the trainers, by job and by kind; the allocator saves them with its accounts.

    Attributes:
        jobs: job -> what it has reported.
        kinds: kind of training -> its speeds, the newest report last.
        profiles: what they have reported of their layers.
    """

    def __init__(self) -> None:
        self.jobs: dict[JobKey, Measured] = {}
        self.kinds: dict[str, dict[SpeedKey, Estimate]] = {}
        self._layers: dict[str, tuple[float, ...]] = {}
        # By what jobs have in common: the nodes as they were, and what follows from all reports.
        self._derived: dict[tuple[Any, ...], tuple[NodeSizes, Any]] = {}
        self.profiles = LayerProfiles()

    def restore(self, jobs: Mapping[JobKey, Measured], kinds: Mapping[str, Speeds]) -> None:
        """Start from what an earlier operator knew."""
        self.jobs = dict(jobs)
        self.kinds = {kind: dict(speeds) for kind, speeds in kinds.items()}

    def knows(self, key: JobKey, launch: int, step: int) -> bool:
        """True if the job's report at ``step`` has been recorded."""
        known = self.jobs.get(key)
        return known is not None and (known.launch, known.step) == (launch, step)

    def record(
        self, key: JobKey, spec: GangSpec, launch: int, report: Report, where: SpeedKey | None
    ) -> None:
        """Add the speed of a report; ``where``: the GPUs that the gang was on; None: not known."""
        measured, rate = self.jobs.setdefault(key, Measured()), report.steps_per_second
        measured.launch, measured.step = launch, report.step
        # Kinds are in order of their newest report.
        profile = self.kinds[spec.kind] = self.kinds.pop(spec.kind, {})
        if where is None or rate is None:
            return
        prior = profile.get(where)
        before = measured.speeds.get(where)
        if before is None and where.nodes == 1 and (gang := where.alone_in_pool) is not None:
            before = stated(spec, *gang)
        if before is None:
            before = NOT_SEEN if prior is None else as_prior(prior)
        self._derived.clear()
        measured.speeds[where] = before.measured(rate)
        profile[where] = (prior or NOT_SEEN).measured(rate)
        layers = rounded(report.layer_seconds)
        if layers and where.nodes is not None:
            self._layers[spec.kind] = layers

    def reported_by(self, key: JobKey) -> Speeds:
        """Speeds that the job itself has reported."""
        measured = self.jobs.get(key)
        return {} if measured is None else dict(measured.speeds)

    def keep(self, keys: Iterable[JobKey]) -> None:
        """Forget all other jobs; their kinds are remembered."""
        wanted = set(keys)
        self.profiles.keep(wanted)
        self.jobs = {key: value for key, value in self.jobs.items() if key in wanted}
        for kind in list(self.kinds)[:-KINDS_KEPT]:
            del self.kinds[kind]
            self._layers.pop(kind, None)

    def estimates(
        self, wanted: Iterable[GangRequest], gpu_types: tuple[str, ...]
    ) -> dict[JobKey, dict[str, Estimate]]:
        """Job -> GPU type -> steps/s of its gang; 0: its spec says that it cannot run. Raises JobFaults."""
        wanted = list(wanted)
        nodes = wanted[0].nodes if wanted else NO_NODES
        self._derived.clear()
        rates: dict[str, dict[JobType, float]] = {gpu_type: {} for gpu_type in gpu_types}
        for kind, profile in self.kinds.items():
            for (gpu_type, stages), estimate in packed_speeds(profile, nodes.fewest).known.items():
                if gpu_type in rates:
                    rates[gpu_type][JobType(name=kind, gpus=stages)] = estimate.steps_per_second
        types: dict[str, JobType] = {}
        own: dict[str, dict[str, Estimate]] = {}
        profiled: set[tuple[str, int]] = set()
        unreported: dict[tuple[str, int], str] = {}

        def look(job: GangRequest) -> str:
            own_name, variant = job_id(job.key), (job.spec.variant, job.gpus)
            name = own_name if job.key in self.jobs else unreported.setdefault(variant, own_name)
            if name in types:  # what is estimated of it is what is known of its type
                return name
            types[name] = job_type = JobType(name=variant[0], gpus=variant[1])
            if variant not in profiled:
                profiled.add(variant)
                of_kind = self._packed_kind(job)
                for gpu_type in gpu_types:
                    prior = self._prior(job, of_kind, gpu_type)
                    if prior is not None:
                        rates[gpu_type][job_type] = prior.steps_per_second
            if reports := self.reported_by(job.key):
                found = {t: self._own(job, self._packed(job, reports), t) for t in gpu_types}
                measured = {t: report for t, report in found.items() if report is not None}
                own[name] = reconcile_with_spec(job, measured)
            return name

        names = each_job(wanted, look, lambda job: job.key)
        estimator = Estimator(
            profiles=ThroughputTable(source="the cluster's jobs", alone_rates=rates),
            gpu_types=gpu_types,
            types=types,
            own=own,
        )
        estimated = estimator.every_job_alone()
        return {job.key: estimated[name] for job, name in zip(wanted, names, strict=True)}

    def _prior(self, job: GangRequest, profile: PackedSpeeds, gpu_type: str) -> Estimate | None:
        """Speed that the spec states or, where it states none, that others of the kind have reported."""
        layers = self._layers_of(job)
        said = stated(job.spec, gpu_type, job.gpus, layers)
        known = said or self._at_size(job, profile.known, gpu_type)
        return known or self._guess(job, profile, gpu_type, None)

    def _own(self, job: GangRequest, reports: PackedSpeeds, gpu_type: str) -> Estimate | None:
        """Speed by its own reports, on as few nodes as possible; None: nothing more than is known."""
        known = self._at_size(job, reports.known, gpu_type)
        if known is not None or not (reports.at_least or reports.at_most):
            return known
        return self._guess(job, reports, gpu_type, self._prior(job, self._packed_kind(job), gpu_type))

    def _guess(
        self, job: GangRequest, speeds: PackedSpeeds, gpu_type: str, prior: Estimate | None
    ) -> Estimate | None:
        """Speed by reports from more or fewer nodes, where ``prior`` is not within their bounds."""
        at_least = self._at_size(job, speeds.at_least, gpu_type)
        return bounded(prior, at_least, self._at_size(job, speeds.at_most, gpu_type))

    def _at_size(
        self, job: GangRequest, speeds: SizeSpeeds, gpu_type: str, size: int | None = None
    ) -> Estimate | None:
        kind = self._packed_kind(job).known
        return resized(speeds, gpu_type, size or job.gpus, job.spec, self._layers_of(job), kind)

    def _packed(self, job: GangRequest, speeds: Speeds) -> PackedSpeeds:
        gangs = (key.alone_in_pool for key in speeds)
        like = self._speeds_of_like_jobs(job, {gang for gang in gangs if gang is not None})
        return packed_speeds(speeds, job.fewest_nodes, like)

    def _packed_kind(self, job: GangRequest) -> PackedSpeeds:
        like = job.spec.variant if job.spec.spread else job.spec.kind
        at = like, job.spec.gpus_per_pod, job.barred
        reported: Speeds = self.kinds.get(job.spec.kind, {})
        return self._once(at, job, lambda: self._packed(job, reported))

    def _once(self, at: tuple[Any, ...], job: GangRequest, work: Callable[[], T]) -> T:
        """The outcome of ``work`` on jobs that have ``at`` in common, until one reports."""
        nodes, found = self._derived.get(at, (None, None))
        if nodes is not job.nodes:
            found = work()
            self._derived[at] = job.nodes, found
        return cast(T, found)

    def _speeds_of_like_jobs(self, job: GangRequest, gangs: Iterable[tuple[str, int]]) -> Speeds:
        """Speeds that its kind has reported, else those that its spec states of ``gangs`` by their nodes."""
        reported = self.kinds.get(job.spec.kind, {})
        if not job.spec.spread:
            return reported
        return {**reported, **{at: known for gang in gangs for at, known in job.stated_spread(*gang).items()}}

    def speed_on(self, job: GangRequest, gpu_type: str, gpus: int, nodes: int, packed: float) -> float:
        """Steps/s of its gang of ``gpus`` on ``nodes`` nodes, where it does ``packed`` on the fewest."""
        return speed_on(
            nodes,
            gpu_type,
            gpus,
            packed=packed,
            fewest=job.fewest_nodes(gpu_type, gpus) or nodes,
            own=self.reported_by(job.key),
            like=self._speeds_of_like_jobs(job, [(gpu_type, gpus)]),
        )

    def spread_gang(
        self,
        job: GangRequest,
        at: Placement,
        packed: Mapping[str, float],
        *,
        per_pod: int,
        restart_seconds: float,
        may_move: bool,
    ) -> SpreadGang | None:
        """The running gang as rounds see it, if it is on more nodes than would hold it; None: it is not.

        Also one on fewer than that, as on the last large node, which is cordoned: its speed is another, too.

        ``at``: where it is, in one pool. ``packed``: GPU type -> its steps/s with the GPUs that it has, on as
        few nodes as possible. ``per_pod``: GPUs of each of its pods.
        """
        nodes, gpu_type, gpus = len(set(at.nodes)), at.gpu_type, len(at.nodes)
        fewest = job.fewest_nodes(gpu_type, gpus)
        if fewest is None or nodes == fewest or packed.get(gpu_type, 0.0) <= 0:
            return None
        here = job.nodes.in_pool(at.pool, gpus, per_pod=per_pod, barred=job.barred)
        fewest_here = min(nodes, here or nodes)
        return SpreadGang(
            at=at,
            fewest=fewest_here,
            speed=self.speed_on(job, gpu_type, gpus, nodes, packed[gpu_type]),
            packed_speed=self.speed_on(job, gpu_type, gpus, fewest_here, packed[gpu_type]),
            restart_seconds=restart_seconds,
            may_move=may_move,
        )

    def from_where_it_is(
        self, job: GangRequest, at: Placement, by_size: Mapping[str, Mapping[int, float]], free: int
    ) -> dict[str, Mapping[int, float]]:
        """The speeds of a running elastic gang in one pool, there as of :func:`.speeds_where_it_is`.

        ``by_size``: GPU type -> GPUs -> steps/s on as few nodes as possible; ``free``: GPUs of its own nodes.
        """
        gpu_type, held = at.gpu_type, len(at.nodes)
        if gpu_type not in by_size:
            return dict(by_size)
        here = speeds_where_it_is(
            at,
            by_size[gpu_type],
            held + free,
            lambda size: job.fewest_nodes(gpu_type, size),
            lambda size, nodes, rate: self.speed_on(job, gpu_type, size, nodes, rate),
        )
        return {**by_size, gpu_type: here}

    def _layers_of(self, job: GangRequest) -> tuple[float, ...]:
        """Each layer's part of the step, as jobs of the kind have measured it last; empty: none has."""
        return self._layers.get(job.spec.kind, ()) if self._layers else ()

    def by_size(
        self, job: GangRequest, base: Mapping[str, Estimate], sizes: tuple[int, ...]
    ) -> dict[str, dict[int, float]]:
        """GPU type -> size -> steps/s, for an elastic gang.

        What the job has reported of a size itself, else what is stated or what others of its kind have
        reported, else the nearest of these by the pipeline's model. ``base``: estimates by GPU type, at the
        size ``job.gpus``.
        """
        own = self._packed(job, self.reported_by(job.key)).known
        found: dict[str, dict[int, float]] = {}
        for gpu_type, known in base.items():
            if known.steps_per_second <= 0:
                continue
            if any(of_type == gpu_type for of_type, _ in own):
                here = {size: self._at_size(job, own, gpu_type, size) for size in sizes}
                rates = {
                    size: 0.0 if speed is None else speed.steps_per_second for size, speed in here.items()
                }
            else:
                ratios = self._size_ratios(job, gpu_type, sizes)
                rates = {size: known.steps_per_second * ratio for size, ratio in ratios.items()}
            found[gpu_type] = {size: rate for size, rate in rates.items() if rate > 0}
        return {gpu_type: here for gpu_type, here in found.items() if here}

    def _size_ratios(self, job: GangRequest, gpu_type: str, sizes: tuple[int, ...]) -> Mapping[int, float]:
        """Size -> its speed over that at ``job.gpus``, the same for all jobs like it until one reports."""
        spec, size = job.spec, job.gpus
        alike = spec.variant, spec.ranks_per_position, spec.config.parallelism.data, spec.gpus_per_pod

        def ratios() -> dict[int, float]:
            kind, layers = self._packed_kind(job).known, self._layers_of(job)
            return {
                n: speed_ratio(spec, kind, gpu_type, size, n, layers) if n != size else 1.0 for n in sizes
            }

        return self._once((*alike, job.barred, gpu_type, size, sizes), job, ratios)
