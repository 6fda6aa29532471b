"""Measured throughputs of job types on GPU types: alone, spread over nodes, and in pairs.

Units: steps (minibatches) per second of the whole gang. 0 means that the job does not fit.

Gavel's file layout: GPU type -> ``"('job type', gpus)"`` -> ``"null"`` (steps/s alone) or another such key
(steps/s of both on the same GPUs). ``v100_unconsolidated`` holds gangs on V100s that are spread over nodes.
"""

import ast
import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any


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
    """Speeds of jobs by GPU type.

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


BUILT_IN = ("simulation", "physical_cluster")
"""Gavel's two tables, which come with Ballast (see ``data/gavel/LICENSE``)."""

SPREAD_SUFFIX = "_unconsolidated"
MAX_BYTES = 64 * 2**20
"""A table that unpacks to more is refused: Gavel's largest has 3 MB."""


def read_table(path: Path) -> ThroughputTable:
    """A table in Gavel's JSON layout, gzipped or not.

    Raises:
        OSError: the file cannot be read.
        ThroughputError: the file is not such a table.
    """
    with path.open("rb") as file:
        return parse_gavel(file.read(MAX_BYTES + 1), source=str(path))


@functools.cache
def built_in_table(name: str = "simulation") -> ThroughputTable:
    """One of :data:`BUILT_IN`: the measurements of Gavel's simulations, or of its physical cluster."""
    if name not in BUILT_IN:
        raise ThroughputError(f"there is no built-in table {name!r}; there are {', '.join(BUILT_IN)}")
    file = resources.files("ballast_policies.throughput") / "data" / "gavel" / f"{name}_throughputs.json.gz"
    return parse_gavel(file.read_bytes(), source=f"Gavel's {name} throughputs")


def parse_gavel(data: bytes, *, source: str) -> ThroughputTable:
    """The table that the bytes of a file hold, gzipped or not.

    Raises:
        ThroughputError: they are not such a table; the text names ``source`` and the entry.
    """
    rows = _rows(data, source)
    alone: dict[str, dict[JobType, float]] = {}
    spread: dict[str, dict[JobType, float]] = {}
    pairs: dict[str, dict[JobType, dict[JobType, tuple[float, float]]]] = {}
    for name, types in rows.items():
        gpu_type, is_spread = name.removesuffix(SPREAD_SUFFIX), name.endswith(SPREAD_SUFFIX)
        for key, row in types.items():
            where = f"{source}: {name} / {key}"
            job = _job_type(key, where)
            if not isinstance(row, dict) or "null" not in row:
                raise ThroughputError(f'{where} has no number under "null"')
            (spread if is_spread else alone).setdefault(gpu_type, {})[job] = _rate(row["null"], where)
            if is_spread:
                continue
            pairs.setdefault(gpu_type, {})[job] = {
                _job_type(other, where): (_rate(both[0], where), _rate(both[1], where))
                for other, both in row.items()
                if other != "null" and _is_pair(both, f"{where} / {other}")
            }
        if not is_spread:
            alone.setdefault(gpu_type, {})
    return ThroughputTable(source=source, alone_rates=alone, spread_rates=spread, pair_rates=pairs)


def _rows(data: bytes, source: str) -> dict[str, dict[str, Any]]:
    try:
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(wbits=31).decompress(data, MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES // 2**20} MiB")
        rows = json.loads(data)
    except (ValueError, zlib.error, RecursionError) as error:
        raise ThroughputError(f"{source} is not JSON: {error}") from error
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ThroughputError(
            f"{source} is not a throughput table. To fix: write it as "
            '{gpu type: {"(\'job type\', gpus)": {"null": steps/s}}}'
        )
    return rows


@functools.cache
def _parsed_key(key: str) -> JobType | None:
    try:
        value = ast.literal_eval(key)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    match value:
        case (str(name), int(gpus)) if gpus >= 1 and not isinstance(gpus, bool):
            return JobType(name=name, gpus=gpus)
    return None


def _job_type(key: str, where: str) -> JobType:
    job = _parsed_key(key)
    if job is None:
        raise ThroughputError(f"{where}: {key!r} is not a job type. To fix: write it as ('name', gpus)")
    return job


def _rate(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
        raise ThroughputError(f"{where}: {value!r} must be a number of steps/s, at least 0 and finite")
    return float(value)


def _is_pair(value: object, where: str) -> bool:
    """True if the two were measured together; Gavel leaves others out or writes null."""
    if value is None:
        return False
    if not isinstance(value, list) or len(value) != 2:
        raise ThroughputError(f"{where}: {value!r} must be [steps/s of the first, steps/s of the other]")
    return True
