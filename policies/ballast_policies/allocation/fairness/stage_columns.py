"""The columns of the jobs of a stage: of a gang the GPU types, of elastic jobs their configurations."""

import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.dense_program import needed, taken
from ballast_policies.allocation.solvers.job_classes import mostly_distinct


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageColumns:
    """Ways to run, w of each job.

    Attributes:
        rates: (n, w) as parts of a job's full speed; 0: it cannot run so.
        gpus: (n,) of a gang; of an elastic job the most that it takes.
        use: (k, w, n) GPUs of each type that each column takes; None: column j takes ``gpus`` of type j.
    """

    rates: np.ndarray
    gpus: np.ndarray
    use: np.ndarray | None = None

    def alike(self) -> bool:
        """Whether many jobs have the same columns."""
        parts = [self.rates, self.gpus[:, None]]
        if self.use is not None:
            parts += [each.T for each in self.use]
        return not mostly_distinct(np.concatenate(parts, axis=1))

    def on(self, types: np.ndarray) -> np.ndarray:
        """(n, w) whether a column takes GPUs of one of the ``types`` (k,), a mask."""
        if self.use is None:
            return np.broadcast_to(types, self.rates.shape)
        taken: np.ndarray = (self.use[types] > 0).any(axis=0).T
        return taken

    def used(self, X: np.ndarray) -> np.ndarray:
        """(k,) GPUs in use at shares X (n, w)."""
        used: np.ndarray
        used = self.gpus @ X if self.use is None else self.use.reshape(len(self.use), -1) @ X.T.ravel()
        return used

    def restricted(self, jobs: np.ndarray, types: np.ndarray) -> "StageColumns":
        """Those of ``jobs`` (rows) that take GPUs of ``types`` (indices) only, and of gangs no others."""
        if self.use is None:
            rates = np.asfortranarray(self.rates[np.ix_(jobs, types)])
            return StageColumns(rates=rates, gpus=self.gpus[jobs])
        others = np.ones(len(self.use), dtype=bool)
        others[types] = False
        rates = np.asfortranarray(np.where(self.on(others)[jobs], 0.0, self.rates[jobs]))
        return StageColumns(rates=rates, gpus=self.gpus[jobs], use=self.use[types][:, :, jobs])

    def standing_for(self, jobs: np.ndarray, weight: np.ndarray) -> "StageColumns":
        """Those of ``jobs`` (rows), each with the GPUs of ``weight`` such jobs."""
        use = None if self.use is None else self.use[:, :, jobs] * weight
        return StageColumns(rates=taken(self.rates, jobs), gpus=self.gpus[jobs] * weight, use=use)


def stage_columns(instance: Instance) -> StageColumns:
    """All columns of an instance without pairs; ``columns.place`` is the column of each."""
    top = np.where(instance.top > 0, instance.top, 1.0)
    if not instance.elastic.any():
        return StageColumns(rates=np.asfortranarray(instance.T / top[:, None]), gpus=instance.gpus)
    columns, n = instance.columns, len(top)
    first, place = columns.first, columns.place
    width = int(place.max(initial=0)) + 1
    speed, entries = columns.rate_first / top[first], columns.entries()
    rates, gpus = np.zeros((n, width), order="F"), np.ones(n)
    if len(columns):
        kept = needed(first, speed, None, entries)
        rates[first[kept], place[kept]] = speed[kept]
    np.maximum.at(gpus, first, columns.total_gpus())
    use = np.zeros((len(instance.capacity), width, n))
    column, kind, amount = entries
    use[kind, place[column], first[column]] = amount
    return StageColumns(rates=rates, gpus=gpus, use=use)
