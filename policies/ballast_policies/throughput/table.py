"""Measured throughputs of job types on GPU types: alone, spread over nodes, and in pairs.

Units: steps (minibatches) per second of the whole gang. 0 means that the job does not fit.
"""

import dataclasses
from collections.abc import Mapping


class ThroughputError(ValueError):
    """A throughput is not in the table, or the table cannot be read; the text says which."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobType:
    """A model with its batch size, and the size of its gang."""

    name: str
    gpus: int = 1


Rates = Mapping[str, Mapping[JobType, float]]
"""GPU type -> job type -> steps/s."""

PairRates = Mapping[str, Mapping[JobType, Mapping[JobType, tuple[float, float]]]]
"""GPU type -> job type -> other job type -> (steps/s of the first, of the other) on the same GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputTable:
    """What runs how fast where.

    Attributes:
        source: where it was read from, for messages.
        alone_rates: of jobs on GPUs of their own; 0: the job does not fit. Its keys are the GPU types.
        spread_rates: of gangs spread over several nodes, where they were measured so.
        pair_rates: of two jobs on the same GPUs.
    """

    source: str
    alone_rates: Rates
    spread_rates: Rates = dataclasses.field(default_factory=dict)
    pair_rates: PairRates = dataclasses.field(default_factory=dict)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types that were measured."""
        return tuple(self.alone_rates)

    def alone(self, job: JobType, gpu_type: str) -> float:
        """Steps/s of ``job`` on GPUs of its own.

        Raises:
            ThroughputError: the table has no such job type or GPU type.
        """
        if gpu_type not in self.alone_rates:
            raise ThroughputError(
                f"GPU type {gpu_type!r} is not in {self.source}, which has {', '.join(self.gpu_types)}. "
                "To fix: choose one of these, or use a throughput table that has it"
            )
        rate = self.alone_rates[gpu_type].get(job)
        if rate is None:
            sizes = sorted(other.gpus for other in self.alone_rates[gpu_type] if other.name == job.name)
            known = f"it has {job.name!r} on {sizes} GPUs" if sizes else f"it has no {job.name!r}"
            raise ThroughputError(
                f"job type {job.name!r} on {job.gpus} GPUs of {gpu_type} is not in {self.source}: {known}. "
                "To fix: measure it and add the row"
            )
        return rate

    def spread(self, job: JobType, gpu_type: str) -> float | None:
        """Steps/s of ``job`` spread over several nodes; None: not measured, or it cannot run spread."""
        return self.spread_rates.get(gpu_type, {}).get(job) or None

    def shared(self, job: JobType, other: JobType, gpu_type: str) -> tuple[float, float]:
        """Steps/s of ``job`` and of ``other`` on the same GPUs; (0, 0) where the two do not fit."""
        return self.pair_rates.get(gpu_type, {}).get(job, {}).get(other, (0.0, 0.0))
