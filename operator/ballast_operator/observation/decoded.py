"""Specs and statuses of jobs as values: each is decoded once for each version of it.

They are functions of the stored object and of nothing else, so a follower makes them ahead of its takeover.
Jobs whose specs are the same text share one value: the runs of an experiment differ by their names alone.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from weakref import WeakValueDictionary

from ballast_operator.api import meta
from ballast_operator.api.read import read_job_status
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, Key, Kind, Object, key_of
from ballast_operator.views.spec import JobSpec, read_spec

SLICE_SECONDS = 0.02
"""How long the event loop decodes ahead before others have their turn."""


class DecodedJobs:
    """The jobs of ``caches``, decoded when asked for, or ahead of that while :meth:`run` runs."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._specs: dict[Key, tuple[tuple[str, int], tuple[JobSpec | None, str]]] = {}
        self._statuses: dict[Key, tuple[tuple[str, str | None], TrainingJobStatus]] = {}
        self._shared: WeakValueDictionary[bytes, JobSpec] = WeakValueDictionary()
        self._waiting: dict[Key, None] = {}
        self._arrived = asyncio.Event()
        caches.store_listeners.append(self._stored)

    def spec(self, key: Key, item: Object) -> tuple[JobSpec | None, str]:
        """(spec, why it cannot be used) of the job ``item``."""
        version = (item["metadata"]["uid"], item["metadata"].get("generation", 0))
        known = self._specs.get(key)
        if known is None or known[0] != version:
            known = (version, self._read_spec(item))
            self._specs[key] = known
        return known[1]

    def status(self, key: Key, item: Object) -> TrainingJobStatus:
        """The status of the job ``item``.

        Raises:
            ValueError: it cannot be read.
        """
        version = (item["metadata"]["uid"], item["metadata"].get("resourceVersion"))
        known = self._statuses.get(key)
        if known is None or known[0] != version:
            known = (version, read_job_status(item))
            self._statuses[key] = known
        return known[1]

    def _read_spec(self, item: Object) -> tuple[JobSpec | None, str]:
        name, text = item["metadata"]["name"], json.dumps(item.get("spec"))
        if not meta.is_job_name(name) or name == meta.LEADER_LEASE:
            return read_spec(item)  # refused for its name
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        known = self._shared.get(digest)
        if known is not None:
            return known, ""
        spec, problem = read_spec(item)
        if spec is not None:
            self._shared[digest] = spec
        return spec, problem

    async def run(self) -> None:
        """Decode what is new, a slice at a time, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
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
            for kept in (self._specs, self._statuses, self._waiting):
                kept.pop(key, None)
