"""State that outlives an operator: time promised and received by jobs, recent moves, measured speeds.

One ConfigMap beside the leader's Lease, written at most once a round by the leader. A Kubernetes object may
have 1 MiB; what does not fit is left out by :func:`encode` in a fixed order. A reader takes what it can read
and leaves the rest: nothing in it is needed to run.
"""

import asyncio
import base64
import binascii
import dataclasses
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import shown
from ballast_policies.contract.limits import FILE
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds.memory import RoundMemory
from ballast_policies.scheduling.measurements import MOST_LAYERS, KindProfile, Measured
from ballast_policies.throughput.speeds import Estimate, SpeedKey, Speeds

from ballast_operator.errors import Conflict, NotFound, Rejected, Unavailable
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import CONFIG_MAP, Key, key_of_job

STATE_NAME = "ballast-operator-state"
"""Name of the ConfigMap, in the namespace of the leader's Lease."""

STATE_KEY = "state.json.z"
"""Its key in ``binaryData``: JSON, compressed by zlib."""

VERSION = 1
"""Version of the JSON; a reader does not read another one."""

MOST_BYTES = 900_000
"""Largest compressed state that is written."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Content of the saved state.

    Attributes:
        memory: of the rounds; None before the first.
        jobs: job -> what it has reported.
        kinds: kind of training -> where -> speed, the newest report last.
        layers: kind of training in a namespace -> its layers, the newest report last.
    """

    memory: RoundMemory | None = None
    jobs: Mapping[Key, Measured] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, Speeds] = dataclasses.field(default_factory=dict)
    layers: Mapping[str, KindProfile] = dataclasses.field(default_factory=dict)


class StateStore:
    """The ConfigMap. It is read and made in a thread: that takes 0.2 s of CPU for 5,000 jobs.

    Attributes:
        replaced: it is not as it was loaded or written last: a backup was restored, or somebody changed it.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._written = b""
        self._on: dict[str, str] = {}
        self.replaced = False

    async def load(self) -> SavedState:
        """State that an earlier leader saved, as far as readable. Raises Unavailable: no answer."""
        self._written, self._on, self.replaced = b"", {}, False
        try:
            item = await self._cluster.get(CONFIG_MAP, self._namespace, STATE_NAME)
            self._on = {"resourceVersion": item["metadata"]["resourceVersion"]}
        except NotFound:
            return SavedState()
        except Rejected as error:
            logger.warning("saved state not read, nothing is restored from it: %s", error)
            return SavedState()
        try:
            content = base64.b64decode((item.get("binaryData") or {})[STATE_KEY], validate=True)
            return await asyncio.to_thread(decode, content)
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            logger.warning("saved state not understood, nothing is restored from it: %s", error)
            return SavedState()

    async def save(self, state: SavedState) -> None:
        """Write the state if more than its time has changed; a failure is logged, and tried again.

        Only on the version that is known: accounts of a storage that was set back are not written over.
        """
        timeless = await asyncio.to_thread(encode, _at(state, 0.0))
        if timeless == self._written:
            return
        content = await asyncio.to_thread(encode, state)
        labels = {"app.kubernetes.io/name": "ballast", "app.kubernetes.io/part-of": "ballast"}
        body = CONFIG_MAP.object(
            metadata={"namespace": self._namespace, "name": STATE_NAME, "labels": labels, **self._on},
            binaryData={STATE_KEY: base64.b64encode(content).decode()},
        )
        try:
            written = await self._cluster.apply(CONFIG_MAP, body)
        except (Conflict, NotFound, Rejected, Unavailable) as error:
            logger.warning("state not saved, %d bytes: %s", len(content), error)
            self.replaced = isinstance(error, Conflict | NotFound)
        else:
            self._written = timeless
            self._on = {"resourceVersion": written["metadata"]["resourceVersion"]}


def _at(state: SavedState, at: float) -> SavedState:
    if state.memory is None:
        return state
    return dataclasses.replace(state, memory=dataclasses.replace(state.memory, at=at))


def encode(state: SavedState, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The state in at most ``most_bytes``.

    What is too much is given up in this order: digits of numbers, speeds that single jobs have reported and
    layers (they are reported again), and accounts, first of the jobs to which least is owed.
    """
    content = _compressed(state, digits=9)
    if len(content) <= most_bytes:
        return content
    content = _compressed(state, digits=4)
    if len(content) <= most_bytes:
        return content
    state = dataclasses.replace(state, jobs={}, layers={})
    content = _compressed(state, digits=4)
    while len(content) > most_bytes and state.memory is not None and state.memory.shares:
        kept = _most_owed(state.memory, len(state.memory.shares) * 3 // 4)
        logger.warning(
            "state of %d jobs is too large; %d are kept", len(state.memory.shares), len(kept.shares)
        )
        state = dataclasses.replace(state, memory=kept)
        content = _compressed(state, digits=4)
    return content


def _most_owed(memory: RoundMemory, count: int) -> RoundMemory:

    def owed(job: str) -> float:
        promised, received = memory.promised.get(job, {}), memory.received.get(job, {})
        return abs(sum(promised.values()) - sum(received.values()))

    return memory.of_jobs(set(sorted(memory.shares, key=lambda job: (-owed(job), job))[:count]))


def _compressed(state: SavedState, *, digits: int) -> bytes:
    names: dict[str, int] = {}

    def index(name: str) -> int:
        return names.setdefault(name, len(names))

    def number(value: float) -> float:
        return float(f"{value:.{digits}g}")

    def row(values: Mapping[str, float]) -> list[float]:
        return [part for name, value in values.items() if value for part in (index(name), number(value))]

    def speeds(known: Speeds) -> list[list[Any]]:
        return [
            [
                index(str(k)),
                k.total,
                number(e.steps_per_second),
                number(e.deviation),
                index(e.source),
                e.reports,
            ]
            for k, e in known.items()
            if math.isfinite(e.deviation)
        ]

    memory = state.memory
    content: dict[str, Any] = {"version": VERSION}
    if memory is not None:
        content["memory"] = {
            "at": memory.at,
            "moves": list(memory.moves),
            "gpuTypes": dict(memory.gpu_types),
            "jobs": {
                job: [row(memory.promised.get(job, {})), row(memory.received.get(job, {})), row(shares)]
                for job, shares in memory.shares.items()
            },
        }
    content["jobs"] = {
        "/".join(key): [known.launch, known.step, speeds(known.speeds)] for key, known in state.jobs.items()
    }
    content["kinds"] = {kind: speeds(known) for kind, known in state.kinds.items()}
    content["layers"] = saved_layers(state.layers)
    content["names"] = list(names)
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 6)


def decode(content: bytes) -> SavedState:
    """The state without entries that make no sense. Raises ValueError: it is none of this version."""
    reader = zlib.decompressobj()
    try:
        found = parse_json(reader.decompress(content, FILE.most_bytes).decode(), limits=FILE)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"version is not {VERSION}")
    names = [name for name in _list(found.get("names")) if isinstance(name, str)]

    def row(values: Any) -> dict[str, float]:
        pairs = zip(values[::2], values[1::2], strict=True)
        return {names[_whole(at)]: _amount(value) for at, value in pairs}

    def speeds(known: Any) -> dict[SpeedKey, Estimate]:
        return {
            SpeedKey.read(names[_whole(name)], _whole(gpus)): Estimate(
                steps_per_second=_amount(rate),
                deviation=_amount(deviation),
                source=names[_whole(source)],
                reports=_whole(reports),
            )
            for name, gpus, rate, deviation, source, reports in known
        }

    def measured(entry: Any) -> Measured:
        launch, step, known = entry
        return Measured(launch=_whole(launch), step=-1 if step == -1 else _whole(step), speeds=speeds(known))

    memory = None
    kept = found.get("memory")
    if isinstance(kept, dict):
        rows = _understood(kept.get("jobs"), lambda entry: [row(entry[at]) for at in range(3)])
        memory = RoundMemory(
            promised={job: parts[0] for job, parts in rows.items()},
            received={job: parts[1] for job, parts in rows.items()},
            shares={job: parts[2] for job, parts in rows.items()},
            at=_amount(kept.get("at") or 0),
            moves=tuple(_amount(at) for at in _list(kept.get("moves"))),
            gpu_types={str(k): str(v) for k, v in _object(kept.get("gpuTypes")).items()},
        )
    jobs = _understood(found.get("jobs"), measured)
    return SavedState(
        memory=memory,
        jobs={key_of_job(name): known for name, known in jobs.items()},
        kinds=_understood(found.get("kinds"), speeds),
        layers=_understood(found.get("layers"), read_layers),
    )


def _understood(entries: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    found = {}
    for name, entry in _object(entries).items():
        try:
            found[name] = read(entry)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            logger.warning("saved state of %s not understood: %s", name, error)
    return found


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{shown(value)} is not an amount")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{shown(value)} is not a whole number")
    return value


BYTES = tuple(field.name for field in dataclasses.fields(MeasuredLayers) if field.name != "seconds")
"""Columns of whole numbers, after the seconds."""


def saved_layers(profiles: Mapping[str, KindProfile]) -> dict[str, list[Any]]:
    """Layers as JSON has them."""
    return {
        kind: [
            "/".join(profile.job),
            *(list(getattr(profile.layers, name)) for name in ("seconds", *BYTES)),
        ]
        for kind, profile in profiles.items()
    }


def read_layers(entry: Any) -> KindProfile:
    """Entry of :func:`saved_layers`. Raises TypeError, ValueError: it is none."""
    job, *columns = entry
    if not isinstance(job, str):
        raise ValueError(f"{shown(job)} is not the name of a job")
    if len(columns) != 1 + len(BYTES):
        raise ValueError(f"{len(columns)} columns, {1 + len(BYTES)} are expected")
    rows = [[_amount(value) for value in row] for row in columns]
    count = len(rows[1])
    if not 0 < count <= MOST_LAYERS or any(len(row) not in (0, count) for row in rows):
        raise ValueError(f"{[len(row) for row in rows]} values for {count} layers")
    sizes = {name: tuple(map(int, row)) for name, row in zip(BYTES, rows[1:], strict=True)}
    layers = MeasuredLayers(seconds=tuple(rows[0]), **sizes)
    return KindProfile(key_of_job(job), layers)
