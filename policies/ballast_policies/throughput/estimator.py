"""What runs how fast where, before and while it is measured (dissertation section 5.3.3).

Alone: a job's own reports where it has run; the profiled rate of its job type elsewhere, scaled by
how much faster or slower than its type it has proved to be; for a type that was never profiled,
its own rates elsewhere and the ratios of all profiled types, by matrix completion.

In pairs: normalised rates (shared over alone) of profiled types; for a type that was never
profiled, a fingerprint (its normalised rates with a few profiled partners, completed) finds the
nearest profiled type, whose pairs it borrows.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.throughput.completion import complete
from ballast_policies.throughput.table import JobType, ThroughputTable
from ballast_policies.throughput.track import Estimate

PRIOR_DEVIATION = 0.15
"""Relative deviation of a profiled rate: another machine, another version, other data."""

UNKNOWN_DEVIATION = 1.5
"""Relative deviation where nothing but the GPU types' usual ratios is known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Estimates of one cluster; a value: :meth:`observe` returns the next one.

    Attributes:
        profiles: profiled job types, the prior.
        gpu_types: of the cluster, all in ``profiles``.
        types: job -> its job type.
        own: job -> GPU type -> what its own reports say.
        shared: (job type name, partner's name, GPU type) -> normalised rates seen, of the first.
    """

    profiles: ThroughputTable
    gpu_types: tuple[str, ...]
    types: Mapping[str, JobType] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Mapping[str, Estimate]] = dataclasses.field(default_factory=dict)
    shared: Mapping[tuple[str, str, str], float] = dataclasses.field(default_factory=dict)

    def with_job(self, job: str, job_type: JobType) -> "Estimator":
        """Make ``job`` known; its type need not be profiled."""
        return dataclasses.replace(self, types={**self.types, job: job_type})

    def without_job(self, job: str) -> "Estimator":
        """Forget a job that is done."""
        return dataclasses.replace(
            self,
            types={name: t for name, t in self.types.items() if name != job},
            own={name: rates for name, rates in self.own.items() if name != job},
        )

    def observe(self, job: str, gpu_type: str, steps_per_second: float) -> "Estimator":
        """Take in one report of ``job`` running alone on ``gpu_type``.

        Raises:
            KeyError: the job is not known.
            ValueError: the report is not positive and finite.
        """
        before = self.alone(job)[gpu_type]
        row = {**self.own.get(job, {}), gpu_type: before.measured(steps_per_second)}
        return dataclasses.replace(self, own={**self.own, job: row})

    def observe_pair(self, job: str, other: str, gpu_type: str, steps_per_second: float) -> "Estimator":
        """Take in one report of ``job`` while it shared ``gpu_type`` with ``other``."""
        alone = self.alone(job)[gpu_type].steps_per_second
        if alone <= 0:
            raise ValueError(f"{job} is said to run on {gpu_type}, where it does not fit alone")
        key = (self.types[job].name, self.types[other].name, gpu_type)
        seen = min(1.0, steps_per_second / alone)
        known = self.shared.get(key)
        value = seen if known is None else 0.5 * (seen + known)
        return dataclasses.replace(self, shared={**self.shared, key: value})

    def alone(self, job: str) -> dict[str, Estimate]:
        """GPU type -> estimate for ``job`` on GPUs of its own."""
        job_type, own = self.types[job], self.own.get(job, {})
        base = self._profiled(job_type) or self._completed(job_type, own)
        # How much faster than its type the job has proved to be, where it has run.
        ratios = [
            math.log(own[g].steps_per_second / base[g].steps_per_second)
            for g in own
            if base[g].steps_per_second > 0 and base[g].source == "prior"
        ]
        scale = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
        spread = PRIOR_DEVIATION / math.sqrt(1 + len(ratios))
        found = {}
        for gpu_type, estimate in base.items():
            if gpu_type in own:
                found[gpu_type] = own[gpu_type]
            elif estimate.source == "prior":
                found[gpu_type] = dataclasses.replace(
                    estimate, steps_per_second=estimate.steps_per_second * scale, deviation=spread
                )
            else:
                found[gpu_type] = estimate
        return found

    def pair(self, job: str, other: str, gpu_type: str) -> tuple[Estimate, Estimate]:
        """Estimates for ``job`` and ``other`` on the same GPUs; 0: by their profiles they do not fit."""
        a, b = self.types[job], self.types[other]
        return (
            self._shared_estimate(job, a, b, gpu_type),
            self._shared_estimate(other, b, a, gpu_type),
        )

    def _profiled(self, job_type: JobType) -> dict[str, Estimate] | None:
        key = job_type.key()
        if any(key not in self.profiles.rows[gpu_type] for gpu_type in self.gpu_types):
            return None
        return {
            gpu_type: Estimate(
                steps_per_second=self.profiles.alone(job_type, gpu_type),
                deviation=PRIOR_DEVIATION,
                source="prior",
            )
            for gpu_type in self.gpu_types
        }

    def _completed(self, job_type: JobType, own: Mapping[str, Estimate]) -> dict[str, Estimate]:
        rates = _known_rates(self.profiles, self.gpu_types, job_type.gpus)
        mine = np.array([own[g].steps_per_second if g in own else 0.0 for g in self.gpu_types])
        matrix = np.vstack([rates, mine])
        known = matrix > 0
        filled = complete(np.log(np.where(known, matrix, 1.0)), known)
        source, deviation = ("completed", filled.deviation) if own else ("unknown", UNKNOWN_DEVIATION)
        return {
            gpu_type: Estimate(steps_per_second=float(rate), deviation=deviation, source=source)
            for gpu_type, rate in zip(self.gpu_types, np.exp(filled.values[-1]), strict=True)
        }

    def _shared_estimate(self, job: str, a: JobType, b: JobType, gpu_type: str) -> Estimate:
        alone = self.alone(job)[gpu_type]
        seen = self.shared.get((a.name, b.name, gpu_type))
        if seen is not None:
            share, deviation, source = seen, 0.1, "measured"
        else:
            like_a, exact_a = self.nearest_profile(a, gpu_type)
            like_b, exact_b = self.nearest_profile(b, gpu_type)
            share = _normalised(self.profiles, like_a, like_b, gpu_type)
            exact = exact_a and exact_b
            deviation, source = (PRIOR_DEVIATION, "prior") if exact else (0.3, "completed")
        return Estimate(
            steps_per_second=alone.steps_per_second * share,
            deviation=math.hypot(alone.deviation, deviation),
            source=source,
        )

    def nearest_profile(self, job_type: JobType, gpu_type: str) -> tuple[JobType, bool]:
        """(the profiled type whose behaviour in pairs is nearest, whether it is the type itself)."""
        profiled = _types_of(self.profiles, gpu_type, job_type.gpus)
        if job_type in profiled:
            return job_type, True
        if not profiled:
            raise KeyError(f"no job type on {job_type.gpus} GPUs of {gpu_type} was ever profiled")
        table = _pair_matrix(self.profiles, profiled, gpu_type)
        mine = np.array(
            [self.shared.get((job_type.name, other.name, gpu_type), np.nan) for other in profiled]
        )
        theirs = np.array(
            [self.shared.get((other.name, job_type.name, gpu_type), np.nan) for other in profiled]
        )
        fingerprints = np.vstack([np.hstack([table, table.T]), np.concatenate([mine, theirs])[None, :]])
        known = np.isfinite(fingerprints)
        if not known[-1].any():
            # Nothing seen: the profile in the middle, which is wrong least.
            spread = ((table[:, None, :] - table[None, :, :]) ** 2).sum(axis=2)
            return profiled[int(spread.sum(axis=1).argmin())], False
        filled = complete(np.nan_to_num(fingerprints), known, rank=3, ridge=0.5).values
        distance = ((filled[:-1] - filled[-1]) ** 2).sum(axis=1)
        return profiled[int(distance.argmin())], False


def _types_of(table: ThroughputTable, gpu_type: str, gpus: int) -> list[JobType]:
    """Profiled job types with gangs of ``gpus``, by name."""
    end = f"', {gpus})"
    names = sorted(key[2 : -len(end)] for key in table.rows[gpu_type] if key.endswith(end))
    return [JobType(name=name, gpus=gpus) for name in names]


def _known_rates(table: ThroughputTable, gpu_types: Sequence[str], gpus: int) -> np.ndarray:
    """Rates of all profiled types of this size; of one GPU where none of this size was profiled."""
    types = _types_of(table, gpu_types[0], gpus) or _types_of(table, gpu_types[0], 1)
    return np.array([[table.alone(t, gpu_type) for gpu_type in gpu_types] for t in types])


def _normalised(table: ThroughputTable, a: JobType, b: JobType, gpu_type: str) -> float:
    alone = table.alone(a, gpu_type)
    return table.shared(a, b, gpu_type)[0] / alone if alone > 0 and a.gpus == b.gpus else 0.0


def _pair_matrix(table: ThroughputTable, types: Sequence[JobType], gpu_type: str) -> np.ndarray:
    return np.array([[_normalised(table, a, b, gpu_type) for b in types] for a in types])
