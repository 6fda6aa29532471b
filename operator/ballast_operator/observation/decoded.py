"""Specs and statuses of jobs as values: each is decoded once for each version of it.

They are functions of the stored object and of nothing else, so a follower makes them ahead of its takeover.
Jobs whose specs are the same text share one value, and what a plan is made from, once they have measured
other layers: the runs of an experiment differ by their names alone.
Specs with ``planner`` take longer, up to seconds: they are read in another process, once they are new, edited
or their layers were measured. Their jobs wait, or go on as they are, with what needs no plan as edited.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

from ballast_operator.api import meta
from ballast_operator.api.read import read_job_status
from ballast_operator.api.training_job import PlannerConfig
from ballast_operator.api.training_job_status import MeasuredOnType, TrainingJobStatus
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, Key, Kind, Object, key_of
from ballast_operator.views.spec import (
    BEING_PLANNED,
    JobSpec,
    read_spec,
    spec_as_edited,
    spec_text,
    spec_until_planned,
)

SLICE_SECONDS = 0.02
"""Seconds for which the event loop decodes ahead before others have their turn."""

MOST_TRIES = 3
"""Tries of a plan where the process that makes it ends, or takes too long, as on a busy machine."""

ReadPlanned = Callable[[str, str], Awaitable[tuple[JobSpec | None, str]]]
"""(name, ``spec_text``) -> as ``read_spec``."""


class _Version(NamedTuple):
    """Version of a spec: ``measured`` of a job with ``planner``."""

    uid: str
    generation: int
    measured: tuple[MeasuredOnType, ...]


class _ToPlan(NamedTuple):
    """Spec that is to be planned; the first three fields are its place in the order, False first.

    Attributes:
        goes_on: its job goes on by degrees of measured layers.
        waits: it has no degrees yet.
        ended: its job has.
        measured: nobody has edited what it is planned from: if it cannot be planned, it stays as it is.
        tries: so far.
    """

    goes_on: bool
    waits: bool
    ended: bool
    measured: bool
    tries: int = 0


class DecodedJobs:
    """Jobs, decoded when asked for or ahead; ``listeners`` hear of planned degrees."""

    def __init__(self, caches: Caches, read_planned: ReadPlanned | None = None) -> None:
        """``read_planned``: reads specs with ``planner`` elsewhere, while :meth:`plan` runs; None: here."""
        self.listeners: list[Callable[[Key], None]] = []
        self._read_planned = read_planned
        self._to_plan: dict[Key, _ToPlan] = {}
        self._turns: dict[str, int] = {}
        self._asked = asyncio.Event()
        self._caches = caches
        self._specs: dict[Key, tuple[_Version, tuple[JobSpec | None, str]]] = {}
        self._statuses: dict[Key, tuple[tuple[str, str | None], TrainingJobStatus]] = {}
        self._shared: WeakValueDictionary[bytes, JobSpec] = WeakValueDictionary()
        self._planners: WeakValueDictionary[str, PlannerConfig] = WeakValueDictionary()
        self._waiting: dict[Key, None] = {}
        self._arrived = asyncio.Event()
        caches.store_listeners.append(self._stored)

    def spec(self, key: Key, item: Object) -> tuple[JobSpec | None, str]:
        """(spec, why it cannot be used) of the job ``item``."""
        version, known = self._version(key, item), self._specs.get(key)
        if known is None or known[0] != version:
            before = known[1][0] if known is not None and known[0].uid == version.uid else None
            known = version, self._read_spec(key, item, before)
            self._specs[key] = known
        return known[1]

    def _version(self, key: Key, item: Object) -> _Version:
        metadata, measured = item["metadata"], tuple[MeasuredOnType, ...]()
        if _has_planner(item):
            measured = self.status(key, item).measured_layers
        return _Version(metadata["uid"], metadata.get("generation", 0), measured)

    def status(self, key: Key, item: Object) -> TrainingJobStatus:
        """The status of the job ``item``. Raises ValueError: it cannot be read."""
        version = (item["metadata"]["uid"], item["metadata"].get("resourceVersion"))
        known = self._statuses.get(key)
        if known is None or known[0] != version:
            known = (version, read_job_status(item))
            self._statuses[key] = known
        return known[1]

    def _read_spec(self, key: Key, item: Object, before: JobSpec | None) -> tuple[JobSpec | None, str]:
        name, text = item["metadata"]["name"], spec_text(item)
        self._to_plan.pop(key, None)
        if not meta.is_job_name(name) or name == meta.LEADER_LEASE:
            return read_spec(item)  # refused for its name
        shared = self._shared.get(_digest(text))
        if shared is not None:
            return shared, ""
        if self._read_planned is None or not _has_planner(item):
            return self._share(text, read_spec(item))
        status, measured = self.status(key, item), False
        if before is None:
            spec = spec_until_planned(item, status.allocation)
            # A new operator: its launch has degrees of measured layers.
            goes_on = spec is not None and bool(status.measured_layers)
        else:
            spec, measured = spec_as_edited(item, before)
            if measured and before.is_planned_by(status.measured_layers):
                return self._share(text, (spec, ""))
            goes_on = measured
        self._to_plan[key] = _ToPlan(goes_on, spec is None, status.finished, measured)
        self._asked.set()
        return spec, "" if spec is not None else BEING_PLANNED

    def _share(self, text: str, found: tuple[JobSpec | None, str]) -> tuple[JobSpec | None, str]:
        spec, problem = found
        if spec is not None:
            if spec.asked.planner is not None:
                spec = spec.with_planner(self._planners.setdefault(spec.planned_as, spec.asked.planner))
            self._shared[_digest(text)] = spec
        return spec, problem

    async def plan(self) -> None:
        """Have what is to be planned read, jobs that hold GPUs or were edited first, until cancelled.

        Then those that wait, those that have ended, and those that go on by degrees of measured layers.
        Namespaces take turns: one with thousands of jobs, or with some whose plans take long, delays a job of
        another by one plan.

        Raises:
            OSError: the process does not start; nothing is forgotten, and a call later goes on.
        """
        while True:
            while self._to_plan:
                key = min(self._to_plan, key=lambda key: (self._to_plan[key][:3], self._turns.get(key[0], 0)))
                self._turns[key[0]] = max(self._turns.values(), default=0) + 1
                await self._plan(key)
                await asyncio.sleep(0)
            self._turns.clear()
            self._asked.clear()
            await self._asked.wait()

    async def _plan(self, key: Key) -> None:
        assert self._read_planned is not None
        asked, version, item = self._to_plan.pop(key), self._specs[key][0], self._caches[JOB].get(key)
        if item is None:
            return
        text = spec_text(item)
        same = self._shared.get(_digest(text))  # of a job that was planned while this one waited
        found: tuple[JobSpec | None, str] = same, ""
        try:
            if same is None:
                found = await self._read_planned(item["metadata"]["name"], text)
        except (TimeoutError, ConnectionError) as error:
            if asked.tries + 1 < MOST_TRIES:
                self._ask_again(key, version, asked._replace(tries=asked.tries + 1))
                return
            late = "spec.planner: planning takes too long. To fix: fewer profiles, gpus or layers"
            found = None, late if isinstance(error, TimeoutError) else _cannot_be_planned(error)
        except OSError as error:
            self._ask_again(key, version, asked)
            self._tell_waiting(f"{BEING_PLANNED}, which waits: {error}")
            raise
        except Exception as error:  # whatever it is, the job is told, and the others have their turn
            found = None, _cannot_be_planned(error)
        if self._still(key, version):  # else it was edited or deleted meanwhile
            if found[0] is None and asked.measured:
                found = self._specs[key][1]
            self._specs[key] = version, self._share(text, found)
            for hear in self.listeners:
                hear(key)

    def _tell_waiting(self, why: str) -> None:
        """Set the problem of jobs that have no degrees yet; the next plan of each takes its place."""
        for key in self._to_plan:
            version, (spec, problem) = self._specs[key]
            if spec is None and problem != why:
                self._specs[key] = version, (None, why)
                for hear in self.listeners:
                    hear(key)

    def _ask_again(self, key: Key, version: _Version, asked: _ToPlan) -> None:
        if self._still(key, version):
            self._to_plan[key] = asked

    def _still(self, key: Key, version: _Version) -> bool:
        return key in self._specs and self._specs[key][0] == version

    async def run(self) -> None:
        """Decode what is new, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self.catch_up()

    async def catch_up(self) -> None:
        """Decode what is new, a slice at a time."""
        while self._waiting:
            until = time.monotonic() + SLICE_SECONDS
            while self._waiting and time.monotonic() < until:
                self._decode(next(iter(self._waiting)))
            await asyncio.sleep(0)

    def _decode(self, key: Key) -> None:
        del self._waiting[key]
        item = self._caches[JOB].get(key)
        if item is not None:
            with contextlib.suppress(Exception):  # the caller that asks for it is told why
                self.spec(key, item)
                self.status(key, item)

    def _stored(self, kind: Kind, old: Object | None, new: Object | None) -> None:
        if kind is not JOB:
            return
        if new is not None:
            self._waiting[key_of(new)] = None
            self._arrived.set()
        elif old is not None:
            key = key_of(old)
            for kept in (self._specs, self._statuses, self._waiting, self._to_plan):
                kept.pop(key, None)


def _has_planner(item: Object) -> bool:
    asked = item.get("spec")
    return isinstance(asked, Mapping) and bool(asked.get("planner"))


def _cannot_be_planned(error: Exception) -> str:
    return f"spec.planner: it cannot be planned: {error}. To fix: other profiles or gpus"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
