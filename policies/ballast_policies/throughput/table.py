"""What runs how fast where: oracle throughputs of job types on GPU types, alone and in pairs.

Units: steps (minibatches) per second of the whole gang.  0 means that the job does not fit.
"""

import dataclasses
import functools
import gzip
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

BUILT_IN = ("simulation", "physical_cluster")
"""Gavel's two tables, which come with Ballast (see ``data/gavel/LICENSE``)."""


class ThroughputError(ValueError):
    """A throughput is not in the table, or the table cannot be read; the text says which."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobType:
    """A model with its batch size, and the size of its gang."""

    name: str
    gpus: int = 1

    def key(self) -> str:
        """As the tables name it."""
        return f"('{self.name}', {self.gpus})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputTable:
    """Gavel's layout: GPU type -> job type -> ``null`` (alone) or another job type (shared GPUs).

    Attributes:
        source: where it was read from, for messages.
        rows: the table as it was read.
    """

    source: str
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types that it knows, gangs on nodes of their own (``_unconsolidated``) left out."""
        return tuple(name for name in self.rows if not name.endswith("_unconsolidated"))

    def alone(self, job: JobType, gpu_type: str, *, consolidated: bool = True) -> float:
        """Steps/s of ``job`` on GPUs of its own.

        Raises:
            ThroughputError: the table has no such job type or GPU type.
        """
        row = self._row(job, gpu_type if consolidated else f"{gpu_type}_unconsolidated")
        return float(row["null"])

    def has_unconsolidated(self, job: JobType, gpu_type: str) -> bool:
        """Whether the gang was also measured spread over nodes, where it can run so."""
        row = self.rows.get(f"{gpu_type}_unconsolidated", {}).get(job.key())
        return row is not None and float(row["null"]) > 0

    def shared(self, job: JobType, other: JobType, gpu_type: str) -> tuple[float, float]:
        """Steps/s of ``job`` and of ``other`` on the same GPUs; (0, 0) where the two do not fit."""
        pair = self._row(job, gpu_type).get(other.key())
        return (0.0, 0.0) if pair is None else (float(pair[0]), float(pair[1]))

    def _row(self, job: JobType, gpu_type: str) -> Mapping[str, Any]:
        if gpu_type not in self.rows:
            raise ThroughputError(
                f"GPU type {gpu_type!r} is not in {self.source}, which has {', '.join(self.gpu_types)}. "
                "To fix: name one of these in --cluster, or give a table that has it with --throughputs"
            )
        row = self.rows[gpu_type].get(job.key())
        if row is None:
            types = self.rows[gpu_type]
            sizes = [size for size in (1, 2, 4, 8) if JobType(name=job.name, gpus=size).key() in types]
            known = f"it has {job.name!r} on {sizes} GPUs" if sizes else f"it has no {job.name!r}"
            raise ThroughputError(
                f"job type {job.name!r} on {job.gpus} GPUs of {gpu_type} is not in {self.source}: {known}. "
                "To fix: measure it and add the row"
            )
        return row


def read_table(path: Path) -> ThroughputTable:
    """A table in Gavel's JSON layout, gzipped or not.

    Raises:
        ThroughputError: the file is not such a table.
    """
    data = path.read_bytes()
    return _parse(data, source=str(path))


@functools.cache
def built_in_table(name: str = "simulation") -> ThroughputTable:
    """One of :data:`BUILT_IN`: the oracle of Gavel's simulations, or of its physical cluster."""
    if name not in BUILT_IN:
        raise ThroughputError(f"there is no built-in table {name!r}; there are {', '.join(BUILT_IN)}")
    file = resources.files("ballast_policies.throughput") / "data" / "gavel" / f"{name}_throughputs.json.gz"
    return _parse(file.read_bytes(), source=f"Gavel's {name} throughputs")


def _parse(data: bytes, *, source: str) -> ThroughputTable:
    try:
        rows = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError) as error:
        raise ThroughputError(f"{source} is not JSON: {error}") from error
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ThroughputError(
            f"{source} is not a throughput table. To fix: write it as "
            '{gpu type: {"(\'job type\', gpus)": {"null": steps/s}}}'
        )
    for gpu_type, types in rows.items():
        for key, row in types.items():
            if not isinstance(row, dict) or not isinstance(row.get("null"), int | float):
                raise ThroughputError(f'{source}: {gpu_type} / {key} has no number under "null"')
    return ThroughputTable(source=source, rows=rows)
