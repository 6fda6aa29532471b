"""Gavel's file layout of throughputs, read into a :class:`ThroughputTable`.

GPU type -> ``"('job type', gpus)"`` -> ``"null"`` (steps/s alone) or another such key (steps/s of both on
the same GPUs). ``v100_unconsolidated`` holds gangs on V100s that are spread over nodes.
"""

import ast
import functools
import json
import math
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

from ballast_policies.throughput.table import JobType, ThroughputError, ThroughputTable

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
    return parse_gavel(path.read_bytes(), source=str(path))


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
            partners = {
                _job_type(other, where): (_rate(both[0], where), _rate(both[1], where))
                for other, both in row.items()
                if other != "null" and _is_pair(both, f"{where} / {other}")
            }
            if partners:
                pairs.setdefault(gpu_type, {})[job] = partners
        if not is_spread:
            alone.setdefault(gpu_type, {})
    return ThroughputTable(source=source, alone_rates=alone, spread_rates=spread, pair_rates=pairs)


def _rows(data: bytes, source: str) -> dict[str, dict[str, Any]]:
    try:
        if data[:2] == b"\x1f\x8b":
            data = _unpacked(data)
        rows = json.loads(data)
    except (ValueError, zlib.error, RecursionError) as error:
        raise ThroughputError(f"{source} is not JSON: {error}") from error
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ThroughputError(
            f"{source} is not a throughput table. To fix: write it as "
            '{gpu type: {"(\'job type\', gpus)": {"null": steps/s}}}'
        )
    return rows


def _unpacked(data: bytes) -> bytes:
    """The content of gzipped ``data``, at most :data:`MAX_BYTES`."""
    unpacked = zlib.decompressobj(wbits=31).decompress(data, MAX_BYTES + 1)
    if len(unpacked) > MAX_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_BYTES // 2**20} MiB")
    return unpacked


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
    """Whether the two were measured together; Gavel leaves others out or writes null."""
    if value is None:
        return False
    if not isinstance(value, list) or len(value) != 2:
        raise ThroughputError(f"{where}: {value!r} must be [steps/s of the first, steps/s of the other]")
    return True
