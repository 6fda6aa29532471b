"""Speeds of jobs on GPU types, before and while they are measured (dissertation section 5.3.3).

Alone: a job's own reports where it has run; elsewhere the profiled rate of its job type, scaled by
how much faster or slower than its type the job has been; where its type was never profiled,
the rates that are known of it and the ratios of all profiled types, by matrix completion.

Profiles may be partial: a job type may be known on some GPU types and not on others. The operator's
profiles are what jobs state and what it has measured itself.

Beside another job on its GPU: what a job reports then has the other's kind in its key, and is never taken for
its speed alone. A pair that has not run together is estimated from the pairs that have, by matrix completion.

Matrix completion says what a job would do where it has not been seen, from what others did there. Notation:
M[i, j] with known entries K. Model: M[i, j] = m + r_i + c_j + u_i . v_j with u, v of a small rank. Fitted by
alternating least squares with a ridge penalty (lambda), as in Quasar and in the throughput estimator of the
dissertation (sections 5.3.3 and 5.6). Rows without any known entry get the column's typical value.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.gpus.catalogue import speed_scales
from ballast_policies.throughput.speeds import Estimate, SpeedKey, Speeds
from ballast_policies.throughput.table import JobType, ThroughputTable

SWEEPS = 30

RANK = 2
"""Rank of the part beyond row and column effects."""

RIDGE = 0.1
"""lambda, penalty on the factors; larger is smoother."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The whole matrix.

    Attributes:
        values: M, with the known entries as they were given.
        deviation: standard deviation of the unknown entries, from entries that were left out on purpose.
        mean: m of the model.
        right: (columns, 1 + rank) of the model: c_j and v_j.
    """

    values: np.ndarray
    deviation: float
    mean: float
    right: np.ndarray

    def shifted(self, by: np.ndarray) -> "Completed":
        """Copy with ``by`` (columns,) added to columns of which nothing is known."""
        right = self.right.copy()
        right[:, 0] += by
        return dataclasses.replace(self, values=self.values + by, right=right)

    def row(self, values: np.ndarray, known: np.ndarray) -> np.ndarray:
        """(columns,) one row more, by the columns' factors as they were fitted without it.

        With many rows, one more hardly changes them, and a whole fit takes thousands of times as long.

        ``values``, ``known``: (columns,), as of :func:`complete`.
        """
        rest = np.where(known, values - self.mean, 0.0)[None, :]
        left = _factors(rest - known * self.right[:, :1].T, known[None, :], self.right[:, 1:])
        fitted = self.mean + left[:, :1] + self.right[:, :1].T + left[:, 1:] @ self.right[:, 1:].T
        return np.where(known, values, fitted[0])


def complete(values: np.ndarray, known: np.ndarray) -> Completed:
    """Fill in the entries of ``values`` that are not ``known``.

    Args:
        values: (rows, columns) numbers; what is not known is not read.
        known: (rows, columns) bool.

    Raises:
        ValueError: nothing is known, or a known entry is not finite.
    """
    if not known.any():
        raise ValueError("nothing is known of the matrix, so nothing can be said of the rest")
    if not np.isfinite(values[known]).all():
        raise ValueError("a known entry is not finite")
    fitted, mean, right = _fit(values, known)
    return Completed(
        values=np.where(known, values, fitted),
        deviation=_deviation(values, known),
        mean=mean,
        right=right,
    )


def _deviation(values: np.ndarray, known: np.ndarray) -> float:
    """Root mean square error on each fifth of the known entries, predicted from the other four."""
    entries = np.argwhere(known)
    order = np.random.default_rng(0).permutation(len(entries))
    errors = []
    for fold in range(min(5, len(entries) - 1)):
        held = entries[order[fold::5]]
        rest = known.copy()
        rest[held[:, 0], held[:, 1]] = False
        fitted = _fit(values, rest)[0]
        errors.append((fitted - values)[held[:, 0], held[:, 1]])
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) if errors else float("inf")


def _fit(values: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """(the fitted matrix, m, the columns' effects and factors)."""
    mean = float(values[known].mean())
    rest = np.where(known, values - mean, 0.0)
    rank = min(RANK, *values.shape)
    # First the effects alone; then the leading right factors of what they leave are the start of
    # the rest, so that the same matrix is always completed the same way.
    columns = np.zeros((values.shape[1], 1))
    rows = np.zeros((values.shape[0], 1))
    for _ in range(SWEEPS):
        rows = _factors(rest - known * columns.T, known, np.zeros((values.shape[1], 0)))
        columns = _factors((rest - known * rows).T, known.T, np.zeros((values.shape[0], 0)))
    left_over = rest - known * (rows + columns.T)
    right = np.hstack([columns, np.linalg.svd(left_over, full_matrices=False)[2][:rank].T])
    left = np.hstack([rows, np.zeros((values.shape[0], rank))])
    for _ in range(SWEEPS):
        left = _factors(rest - known * right[:, :1].T, known, right[:, 1:])
        right = _factors((rest - known * left[:, :1]).T, known.T, left[:, 1:])
    fitted: np.ndarray = mean + left[:, :1] + right[:, :1].T + left[:, 1:] @ right[:, 1:].T
    return fitted, mean, right


def _factors(rest: np.ndarray, known: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Effect e and factors u of each row i.

    They minimise sum_j (rest[i, j] - e - u . other_j)^2 + RIDGE (0.1 e^2 + |u|^2) over the known j.
    """
    wide = np.hstack([np.ones((len(other), 1)), other])
    penalty = RIDGE * np.diag([0.1] + [1.0] * other.shape[1])
    gram = np.einsum("ij,jk,jl->ikl", known.astype(float), wide, wide) + penalty
    found: np.ndarray = np.linalg.solve(gram, ((rest * known) @ wide)[:, :, None])[:, :, 0]
    return found


PRIOR_DEVIATION = 0.15
"""Relative deviation of a profiled rate: another machine, another version, other data."""

UNKNOWN_DEVIATION = 1.5
"""Relative deviation where nothing but the GPU types' usual ratios is known."""

UNSEEN_DEVIATION = 0.4
"""Added on a GPU type on which nothing was profiled: it is compared with the others by the catalogue."""

ENOUGH_PROFILES = 10
"""Profiled types of a gang's size below which those of other sizes count too: GPUs compare much alike."""

MOST_PROFILES = 200
"""Rows of a matrix that is completed, at most: more make it slower and hardly better."""

PLAUSIBLE_RATES = (1e-6, 1e6)
PLAUSIBLE_RATIO = 1e3
"""Steps/s, and how much faster one GPU type is than another: a job that states something beyond them says
nothing of others. A least-squares fit has no bound of its own on what one row does to the rest."""

ROWS_TO_FIT_BY = 30
"""Rows from which on a job that is none of them is fitted to the columns as they are: no other fit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Estimates of one cluster.

    Attributes:
        profiles: profiled job types, the prior; those of one GPU type or several.
        gpu_types: of the cluster.
        types: job -> its job type, which need not be profiled.
        own: job -> GPU type -> what its own reports say.
    """

    profiles: ThroughputTable
    gpu_types: tuple[str, ...]
    types: Mapping[str, JobType] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Mapping[str, Estimate]] = dataclasses.field(default_factory=dict)

    def every_job_alone(self) -> dict[str, dict[str, Estimate]]:
        """Job -> GPU type -> estimate on GPUs of its own; with one completion of the profiles for all."""
        filled: dict[int, _Filled] = {}
        # Jobs of one type that have not reported are alike, and there may be thousands.
        known: dict[tuple[JobType, tuple[tuple[str, Estimate], ...]], dict[str, Estimate]] = {}
        found = {}
        for job, job_type in self.types.items():
            like = (job_type, tuple(self.own.get(job, {}).items()))
            if like not in known:
                known[like] = self._alone(job, filled)
            found[job] = known[like]
        return found

    def _alone(self, job: str, filled: "dict[int, _Filled]") -> dict[str, Estimate]:
        job_type, own = self.types[job], self.own.get(job, {})
        base = self._profiled(job_type)
        # How much faster than its type the job was where it has run.
        ratios = [math.log(own[g].steps_per_second / base[g]) for g in own if base.get(g, 0.0) > 0]
        scale = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
        spread = PRIOR_DEVIATION / math.sqrt(1 + len(ratios))
        found = {
            g: Estimate(steps_per_second=rate * scale, deviation=spread, source="prior")
            for g, rate in base.items()
        }
        if any(g not in base and g not in own for g in self.gpu_types):
            own_rates = {g: estimate.steps_per_second / scale for g, estimate in own.items() if g not in base}
            # What is completed is no more certain than what it is completed from.
            sources = [estimate.deviation for estimate in {**found, **own}.values()]
            completed = self._completed(job_type, base | own_rates, filled)
            found |= {
                g: dataclasses.replace(
                    estimate,
                    steps_per_second=estimate.steps_per_second * scale,
                    deviation=math.hypot(estimate.deviation, min(sources, default=0.0)),
                )
                for g, estimate in completed.items()
                if g not in found
            }
        return {g: own.get(g) or found[g] for g in self.gpu_types}

    def _profiled(self, job_type: JobType) -> dict[str, float]:
        """Profiled steps/s of the type, by GPU type."""
        return {
            gpu_type: self.profiles.alone(job_type, gpu_type)
            for gpu_type in self.gpu_types
            if job_type in self.profiles.alone_rates.get(gpu_type, {})
        }

    def _completed(
        self, job_type: JobType, known: Mapping[str, float], filled: "dict[int, _Filled]"
    ) -> dict[str, Estimate]:
        """Estimates on every GPU type, from the rates ``known`` of the job and the profiles of all others."""
        profiles = filled.get(job_type.gpus)
        if profiles is None:
            profiles = filled[job_type.gpus] = _Filled.of(self.profiles, self.gpu_types, job_type.gpus)
        rates, deviation = profiles.like(job_type, np.array([known.get(g, 0.0) for g in self.gpu_types]))
        seen = any(rate > 0 for rate in known.values())
        source, deviation = ("completed", deviation) if seen else ("unknown", UNKNOWN_DEVIATION)
        anywhere = [bool(column.any()) for column in profiles.rates.T]
        return {
            gpu_type: Estimate(
                steps_per_second=float(rate),
                deviation=deviation if ran or not seen else math.hypot(deviation, UNSEEN_DEVIATION),
                source=source,
            )
            for gpu_type, rate, ran in zip(self.gpu_types, rates, anywhere, strict=True)
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Filled:
    """The profiles of one gang size as a matrix, completed. The last row: a job of which nothing is known.

    Attributes:
        types: the job type of each row but the last, with the row.
        gpu_types: of the columns.
        rates: (rows, GPU types) as known, 0 where not.
        fitted: the completion of the logarithms; None where nothing is known.
    """

    types: Mapping[JobType, int]
    gpu_types: tuple[str, ...]
    rates: np.ndarray
    fitted: Completed | None

    @classmethod
    def of(cls, table: ThroughputTable, gpu_types: Sequence[str], gpus: int) -> "_Filled":
        every = {known for gpu_type in gpu_types for known in table.alone_rates.get(gpu_type, {})}
        every = {known for known in every if _plausible(table, known, gpu_types)}
        types = sorted((t for t in every if t.gpus == gpus), key=lambda t: t.name)
        if len(types) < ENOUGH_PROFILES:
            others = (t for t in every if t.gpus != gpus)
            types += sorted(others, key=lambda t: (abs(math.log(t.gpus / gpus)), t.name))
        types = types[:MOST_PROFILES]
        rates = np.zeros((len(types) + 1, len(gpu_types)))
        for j, gpu_type in enumerate(gpu_types):
            row = table.alone_rates.get(gpu_type, {})
            for i, job_type in enumerate(types):
                rates[i, j] = row.get(job_type, 0.0)
        return cls(
            types={known: row for row, known in enumerate(types)},
            gpu_types=tuple(gpu_types),
            rates=rates,
            fitted=_completion(rates, tuple(gpu_types)),
        )

    def like(self, job_type: JobType, mine: np.ndarray) -> tuple[np.ndarray, float]:
        """((GPU types,) rates of a job of which ``mine`` is known, 0 where not; deviation).

        1 step/s everywhere if nothing is known of any.
        """
        row, fitted, known = self.types.get(job_type, -1), self.fitted, mine > 0
        other = not np.array_equal(self.rates[row], mine)
        by_columns = other and fitted is not None and len(self.types) >= ROWS_TO_FIT_BY
        if other and not by_columns:
            row, fitted = -1, _completion(np.vstack([self.rates, mine]), self.gpu_types)
        if fitted is None:
            return np.ones(len(mine)), UNKNOWN_DEVIATION
        values = fitted.row(np.log(np.where(known, mine, 1.0)), known) if by_columns else fitted.values[row]
        return np.where(known, mine, np.exp(values)), min(fitted.deviation, UNKNOWN_DEVIATION)


def _plausible(table: ThroughputTable, job_type: JobType, gpu_types: Sequence[str]) -> bool:
    """True if the rates of a job type are plausible enough to predict others."""
    known = [rate for g in gpu_types if (rate := table.alone_rates.get(g, {}).get(job_type, 0.0)) > 0]
    if not known:
        return False
    least, most = min(known), max(known)
    return PLAUSIBLE_RATES[0] <= least and most <= min(PLAUSIBLE_RATES[1], PLAUSIBLE_RATIO * least)


def _completion(rates: np.ndarray, gpu_types: tuple[str, ...]) -> Completed | None:
    """The completed logarithms of a matrix of rates; None: nothing is known."""
    return _completion_of(rates.tobytes(), rates.shape, gpu_types)


@functools.lru_cache(maxsize=128)
def _completion_of(content: bytes, shape: tuple[int, int], gpu_types: tuple[str, ...]) -> Completed | None:
    """As :func:`_completion`; the profiles are mostly those of the last time. Not to be changed."""
    rates = np.frombuffer(content).reshape(shape)
    known = rates > 0
    if not known.any():
        return None
    filled = complete(np.log(np.where(known, rates, 1.0)), known)
    return filled.shifted(_beyond_the_others(known, gpu_types))


def _beyond_the_others(known: np.ndarray, gpu_types: Sequence[str]) -> np.ndarray:
    """(GPU types,) logarithm of how much faster than the known types those are on which nothing has run.

    By the catalogue; 0 for types that it does not have, and for known ones.
    """
    unseen, found = ~known.any(axis=0), np.zeros(len(gpu_types))
    if not unseen.any():
        return found
    scales = speed_scales(gpu_types)
    logs = np.array([math.log(scales[name]) if name in scales else np.nan for name in gpu_types])
    seen = known.sum(axis=0) * np.isfinite(logs)
    if seen.any():
        typical = float(np.nansum(seen * np.nan_to_num(logs)) / seen.sum())
        found[unseen] = np.nan_to_num(logs - typical)[unseen]
    return found


FIRST_GUESS = 0.6
"""Speed in a pair over that alone, before any pair has been measured on a GPU type: the mean over pairs of
one-GPU jobs in the measurements that Gavel's simulations use is 0.54 on K80, 0.60 on P100, 0.66 on V100."""

LEAST, MOST = 0.05, 1.0
"""Bounds of an estimate: sharing makes no job faster, and none stands still."""

MOST_KINDS = 100
"""Kinds of a matrix that is completed, the newest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Relative:
    """Speed of a job beside another over its speed alone.

    Attributes:
        value: from 0 to 1.
        measured: a job of the kind has run so; otherwise it is an estimate.
    """

    value: float
    measured: bool


@dataclasses.dataclass(frozen=True)
class PairSpeeds:
    """Measured speeds of pairs.

    Attributes:
        measured: GPU type -> (kind, the partner's kind) -> speed over that alone.
    """

    measured: Mapping[str, Mapping[tuple[str, str], float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, kinds: Mapping[str, Speeds], stated: Mapping[str, Mapping[str, float]] | None = None
    ) -> "PairSpeeds":
        """Speeds of pairs from those of each kind, alone and beside others.

        ``stated``: kind -> GPU type -> steps/s alone, which count where none was measured.
        """
        found: dict[str, dict[tuple[str, str], float]] = {}
        for kind, speeds in kinds.items():
            for key, estimate in speeds.items():
                if not key.partner:
                    continue
                gpu_type, gpus = key.gpus[0]
                known = speeds.get(SpeedKey.of(gpu_type, gpus))
                said = (stated or {}).get(kind, {}).get(gpu_type, 0.0)
                alone = said if known is None else known.steps_per_second
                if alone > 0:
                    relative = min(MOST, estimate.steps_per_second / alone)
                    found.setdefault(gpu_type, {})[kind, key.partner] = relative
        return cls(found)

    def relative(self, kind: str, partner: str, gpu_type: str) -> Relative:
        """Speed of a job of ``kind`` beside one of ``partner`` over its speed alone, on a GPU of the type."""
        known = self.measured.get(gpu_type, {})
        if (kind, partner) in known:
            return Relative(known[kind, partner], measured=True)
        if not known:
            return Relative(FIRST_GUESS, measured=False)
        rows, values = self._completed[gpu_type]
        # The last row and column are those of a kind that has run in no pair.
        return Relative(float(values[rows.get(kind, -1), rows.get(partner, -1)]), measured=False)

    @functools.cached_property
    def _completed(self) -> dict[str, tuple[dict[str, int], np.ndarray]]:
        """GPU type -> (kind -> row and column, matrix of estimates)."""
        found = {}
        for gpu_type, known in self.measured.items():
            names = dict.fromkeys(name for pair in known for name in pair)
            rows = {name: row for row, name in enumerate(list(names)[-MOST_KINDS:])}
            matrix = np.full((len(rows) + 1, len(rows) + 1), np.nan)
            for (kind, partner), value in known.items():
                if kind in rows and partner in rows:
                    matrix[rows[kind], rows[partner]] = value
            seen = np.isfinite(matrix)
            if not seen.any():
                matrix[:] = FIRST_GUESS
            else:
                matrix = np.where(seen, matrix, _fit(np.nan_to_num(matrix), seen)[0])
            found[gpu_type] = rows, np.clip(matrix, LEAST, MOST)
        return found
