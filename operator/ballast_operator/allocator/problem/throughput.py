"""How fast a job would be on each GPU type: the policies' estimator, fed with what the cluster says.

The prior of a job's kind is what its spec states and, where it states nothing, what other jobs of the
same kind (model and batches) have reported. A job's own reports take the prior's place, and scale it
elsewhere: a model that got cheaper got cheaper everywhere. Where a kind was never seen on a GPU type,
matrix completion over all kinds says how that type compares (dissertation section 5.3.3). Every
estimate has a deviation, which falls as reports come.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ballast_policies.contract.limits import MOST_RATE
from ballast_policies.rounds import mixed_name
from ballast_policies.throughput.by_size import rounded
from ballast_policies.throughput.estimator import PRIOR_DEVIATION, Estimator
from ballast_policies.throughput.table import JobType, ThroughputTable
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.problem.layer_profiles import LayerProfiles
from ballast_operator.allocator.problem.size_speeds import (
    Speeds,
    between,
    known_ratio,
    nearest,
    resized,
    size_ratio,
    stated,
)
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.kube.kinds import Key, job_id
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

KINDS_KEPT = 100
"""Kinds of training whose measured speeds are remembered when their jobs are gone; the oldest go first."""

LEAST_RATE = 1e-9
"""Steps/s below this are a stand-still and no measurement."""

NOT_SEEN = Estimate(steps_per_second=0.0, deviation=math.inf, source="unknown")


@dataclasses.dataclass(slots=True)
class Measured:
    """What one job has reported."""

    launch: int = 0
    step: int = -1
    speeds: dict[tuple[str, int], Estimate] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangRequest:
    """A job, and the gang for which its speed is asked."""

    key: Key
    spec: JobSpec
    stages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a spec's kind and variant are."""

    spec: JobSpec
    name: str
    variant: str


class Measurements:
    """What the trainers have reported, by job and by kind; the allocator saves it with its accounts.

    Attributes:
        profiles: what they have reported of their layers.
    """

    def __init__(self) -> None:
        self._jobs: dict[Key, Measured] = {}
        self._kinds: dict[str, dict[tuple[str, int], Estimate]] = {}
        self._kind_by_job: dict[Key, _Kind] = {}
        self._layers: dict[str, tuple[float, ...]] = {}
        self.profiles = LayerProfiles()

    @property
    def jobs(self) -> Mapping[Key, Measured]:
        """Job -> what it has reported."""
        return self._jobs

    @property
    def kinds(self) -> Mapping[str, Speeds]:
        """Kind of training -> its speeds, the newest report last."""
        return self._kinds

    def restore(self, jobs: Mapping[Key, Measured], kinds: Mapping[str, Speeds]) -> None:
        """Start from what an earlier operator knew."""
        self._jobs = dict(jobs)
        self._kinds = {kind: dict(speeds) for kind, speeds in kinds.items()}

    def record(self, view: JobView) -> None:
        """Add the job's newest report, once."""
        allocation, lease = view.status.allocation, view.lease
        if allocation is None or lease is None or lease.report is None or not view.acknowledged:
            return
        self.profiles.record(view)
        report, plan = lease.report, view.launched_plan
        rate = report.steps_per_second
        if plan is None or report.epoch != plan.epoch or rate is None or not LEAST_RATE <= rate <= MOST_RATE:
            return
        measured = self._jobs.setdefault(view.key, Measured())
        if view.spec is None or (measured.launch, measured.step) == (allocation.launch, report.step):
            return
        measured.launch, measured.step = allocation.launch, report.step
        kind = kind_of(view.spec)
        # Kinds are in order of their newest report.
        profile = self._kinds[kind] = self._kinds.pop(kind, {})
        where = measured_on(allocation), len(plan.ranks)
        prior = profile.get(where)
        before = measured.speeds.get(where) or stated(view.spec, *where)
        if before is None:
            before = NOT_SEEN if prior is None else as_prior(prior)
        measured.speeds[where] = before.measured(rate)
        profile[where] = (prior or NOT_SEEN).measured(rate)
        layers = rounded(report.layer_seconds)
        if layers and not allocation.parts:
            self._layers[kind] = layers

    def reported_by(self, key: Key) -> Speeds:
        """What the job itself has reported."""
        measured = self._jobs.get(key)
        return {} if measured is None else dict(measured.speeds)

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget all other jobs; their kinds are remembered."""
        wanted = set(keys)
        self.profiles.keep(wanted)
        for gone in [key for key in self._kind_by_job if key not in wanted]:
            del self._kind_by_job[gone]
        self._jobs = {key: value for key, value in self._jobs.items() if key in wanted}
        for kind in list(self._kinds)[:-KINDS_KEPT]:
            del self._kinds[kind]
            self._layers.pop(kind, None)

    def estimates(
        self, wanted: Iterable[GangRequest], gpu_types: tuple[str, ...]
    ) -> dict[Key, dict[str, Estimate]]:
        """Job -> GPU type -> steps/s of its gang; 0 where its spec says that it cannot run."""
        wanted = list(wanted)
        rates: dict[str, dict[JobType, float]] = {gpu_type: {} for gpu_type in gpu_types}
        for kind, profile in self._kinds.items():
            for (gpu_type, stages), estimate in profile.items():
                if gpu_type in rates:
                    rates[gpu_type][JobType(name=kind, gpus=stages)] = estimate.steps_per_second
        types: dict[str, JobType] = {}
        own: dict[str, dict[str, Estimate]] = {}
        profiled: set[JobType] = set()
        for job in wanted:
            name, known = job_id(job.key), self._kind_of(job)
            types[name] = job_type = JobType(name=known.variant, gpus=job.stages)
            if job_type not in profiled:
                profiled.add(job_type)
                profile = self._kinds.get(known.name, {})
                for gpu_type in gpu_types:
                    prior = self._prior(job, profile, gpu_type)
                    if prior is not None:
                        rates[gpu_type][job_type] = prior.steps_per_second
            reports = self.reported_by(job.key)
            if reports:
                layers = self._layers_of(job)
                found = ((t, resized(reports, t, job.stages, job.spec, layers)) for t in gpu_types)
                own[name] = reconcile_with_spec(job, {t: report for t, report in found if report is not None})
        estimator = Estimator(
            profiles=ThroughputTable(source="the cluster's jobs", alone_rates=rates),
            gpu_types=gpu_types,
            types=types,
            own=own,
        )
        estimated = estimator.every_job_alone()
        return {job.key: estimated[job_id(job.key)] for job in wanted}

    def _prior(self, job: GangRequest, profile: Speeds, gpu_type: str) -> Estimate | None:
        """What the spec states or, where it states nothing, what others of the kind have reported."""
        layers = self._layers_of(job)
        said = stated(job.spec, gpu_type, job.stages, layers)
        return said or resized(profile, gpu_type, job.stages, job.spec, layers)

    def _layers_of(self, job: GangRequest) -> tuple[float, ...]:
        """Each layer's part of the step, as jobs of the kind have measured it last; empty: none has."""
        return self._layers.get(self._kind_of(job).name, ()) if self._layers else ()

    def by_size(
        self, job: GangRequest, base: Mapping[str, Estimate], sizes: tuple[int, ...]
    ) -> dict[str, dict[int, float]]:
        """GPU type -> size -> steps/s, for an elastic gang.

        What the job has reported of a size itself, else what is stated or what others of its kind have
        reported, else the nearest of these by the pipeline's model.

        Args:
            job: with ``stages`` the size of ``base``.
            base: GPU type -> its estimate at that size.
            sizes: fewest first.
        """
        own, kind = self.reported_by(job.key), self._kinds.get(self._kind_of(job).name, {})
        layers = self._layers_of(job)
        found: dict[str, dict[int, float]] = {}
        for gpu_type, known in base.items():
            if known.steps_per_second <= 0:
                continue
            reported = {size: e.steps_per_second for (t, size), e in own.items() if t == gpu_type}
            here: dict[int, float] = {}
            for size in sizes:
                rate = between(reported, size)
                if rate is None:
                    start = nearest(reported, size) if reported else job.stages
                    ratio = known_ratio(job.spec, kind, gpu_type, start, size)
                    if ratio is None:
                        ratio = size_ratio(job.spec, start, size, layers)
                    rate = reported.get(start, known.steps_per_second) * ratio
                here[size] = rate
            found[gpu_type] = {size: rate for size, rate in here.items() if rate > 0}
        return {gpu_type: here for gpu_type, here in found.items() if here}

    def _kind_of(self, job: GangRequest) -> "_Kind":
        """The job's kind, by its present spec."""
        known = self._kind_by_job.get(job.key)
        if known is None or known.spec is not job.spec:
            known = _Kind(spec=job.spec, name=kind_of(job.spec), variant=variant_of(job.spec))
            self._kind_by_job[job.key] = known
        return known


def measured_on(allocation: JobAllocation) -> str:
    """Under which name the gang's speed is remembered: its GPU type, or those of its parts with the counts.

    So the speed of a gang in several pools counts for none of their types.
    """
    return mixed_name(allocation.by_pool) if allocation.parts else allocation.gpu_type


def kind_of(spec: JobSpec) -> str:
    """Equal for jobs that run alike: a model with its batches, or a command of an image."""
    if spec.is_script:
        return _digest(["script", *spec.own_command])
    pipeline = spec.config_fields["pipeline"]
    batches = {
        key: pipeline.get(key) for key in ("globalBatchSize", "microbatches", "schedule", "stagesPerRank")
    }
    parts = [spec.config_fields["model"], batches, spec.config_fields.get("dynamics")]
    return _digest(parts)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def variant_of(spec: JobSpec) -> str:
    """As :func:`kind_of`; jobs that state other speeds are told apart."""
    if not spec.throughput:
        return kind_of(spec)
    stated_speeds = json.dumps(
        [[t, sorted(by_stages.items())] for t, by_stages in sorted(spec.throughput.items())]
    )
    return f"{kind_of(spec)}-{hashlib.sha256(stated_speeds.encode()).hexdigest()[:8]}"


def reconcile_with_spec(job: GangRequest, reports: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """GPU type -> reports; where they bear out how the spec says that types compare, exactly so.

    A window with a pause in it would otherwise change who gets which GPU. Beyond PRIOR_DEVIATION the
    reports count as they are.
    """
    said = {gpu_type: stated(job.spec, gpu_type, job.stages) for gpu_type in reports}
    expected = {t: s.steps_per_second for t, s in said.items() if s is not None and s.steps_per_second > 0}
    ratios = {t: math.log(reports[t].steps_per_second / rate) for t, rate in expected.items()}
    scale = sum(ratios.values()) / len(ratios) if ratios else 0.0
    if any(abs(ratio - scale) > PRIOR_DEVIATION for ratio in ratios.values()):
        return dict(reports)
    borne_out = {
        t: dataclasses.replace(reports[t], steps_per_second=rate * math.exp(scale))
        for t, rate in expected.items()
    }
    return {**reports, **borne_out}


def as_prior(estimate: Estimate) -> Estimate:
    """What other jobs of the kind have reported, as a job takes it before it reports itself."""
    return Estimate(
        steps_per_second=estimate.steps_per_second,
        deviation=math.hypot(estimate.deviation, PRIOR_DEVIATION),
        source="prior",
    )
