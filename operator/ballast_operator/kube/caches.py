"""What the operator knows of the world: one store a kind, fed by watches, by lists and by its own writes.

A store keeps the newest version of each object by resourceVersion, so that feeds may overlap: the
answer to a write is in the store before the watch brings it, and an old watch event cannot undo it.
Reading never blocks; objects are shared and must not be changed.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from ballast_policies.contract import JOB_LABEL

from ballast_operator.kube.kinds import (
    CONFIG_MAP,
    JOB,
    LEASE,
    NODE,
    POD,
    POLICY,
    Key,
    Kind,
    Object,
    key_of,
    version_of,
)

logger = logging.getLogger(__name__)

Listener = Callable[[Kind, Object], None]

WATCHED = (JOB, POLICY, POD, NODE, CONFIG_MAP, LEASE)
"""Kinds that are watched."""

SELECTORS = {CONFIG_MAP: JOB_LABEL, LEASE: JOB_LABEL}
"""Kinds of which only labelled objects are watched."""


class Store:
    """The objects of one kind."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._deleted: dict[str, int] = {}
        self._by_job: defaultdict[Key, set[Key]] = defaultdict(set)

    def __iter__(self) -> Iterator[Object]:
        return iter(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, key: Key) -> Object | None:
        """The object, or None."""
        return self._objects.get(key)

    def of_job(self, key: Key) -> list[Object]:
        """Objects that carry the label of the job with this key, by name."""
        return [self._objects[item] for item in sorted(self._by_job.get(key, ()))]

    def put(self, item: Object) -> bool:
        """Keep ``item`` unless a newer version, or its deletion, is known; says whether it was kept."""
        key, uid = key_of(item), item["metadata"].get("uid", "")
        if uid in self._deleted:
            return False
        known = self._objects.get(key)
        if known is not None and version_of(known) >= version_of(item):
            return False
        self._forget(key)
        self._objects[key] = item
        job = _job_of(item)
        if job is not None:
            self._by_job[job].add(key)
        return True

    def remove(self, item: Object) -> bool:
        """The object with this uid is gone for good."""
        key, uid = key_of(item), item["metadata"].get("uid", "")
        self._deleted[uid] = version_of(item)
        while len(self._deleted) > 4096:
            self._deleted.pop(next(iter(self._deleted)))
        known = self._objects.get(key)
        if known is None or known["metadata"].get("uid", "") != uid:
            return False
        self._forget(key)
        return True

    def missing_from(self, listed: Iterable[Object], version: int) -> list[Object]:
        """Objects that are known, not in the list, and not newer than it: deleted without notice."""
        uids = {item["metadata"].get("uid", "") for item in listed}
        return [
            item
            for item in self._objects.values()
            if item["metadata"].get("uid", "") not in uids and version_of(item) <= version
        ]

    def _forget(self, key: Key) -> None:
        known = self._objects.pop(key, None)
        job = _job_of(known) if known is not None else None
        if job is not None:
            self._by_job[job].discard(key)
            if not self._by_job[job]:
                del self._by_job[job]


def _job_of(item: Object) -> Key | None:
    metadata = item["metadata"]
    name = (metadata.get("labels") or {}).get(JOB_LABEL)
    return (metadata.get("namespace", ""), name) if name else None


class Caches:
    """All stores, and who wants to hear of changes."""

    def __init__(self) -> None:
        self.stores: dict[Kind, Store] = {kind: Store() for kind in WATCHED}
        self.listeners: list[Listener] = []
        self.last_event: dict[Kind, float] = {}
        self.lagging_since: dict[Kind, float] = {}

    def __getitem__(self, kind: Kind) -> Store:
        return self.stores[kind]

    def watched(self, kind: Kind, event: str | None, item: Object) -> None:
        """Take in an event of a watch; ``event`` is ADDED, MODIFIED, DELETED, or None for the first list."""
        self.last_event[kind] = time.monotonic()
        self.lagging_since.pop(kind, None)
        changed = self.stores[kind].remove(item) if event == "DELETED" else self.stores[kind].put(item)
        if changed:
            self._tell(kind, item)

    def wrote(self, kind: Kind, item: Object) -> None:
        """Take in the answer to an own write, ahead of the watch."""
        if kind in self.stores:
            self.stores[kind].put(item)

    def listed(self, kind: Kind, items: list[Object], version: int) -> int:
        """Take in a fresh list; returns how many objects the watch had not delivered."""
        store = self.stores[kind]
        changed = [item for item in items if store.put(item)]
        gone = [item for item in store.missing_from(items, version) if store.remove(item)]
        if changed or gone:
            self.lagging_since.setdefault(kind, time.monotonic())
        else:
            self.lagging_since.pop(kind, None)
        for item in changed + gone:
            self._tell(kind, item)
        return len(changed) + len(gone)

    def _tell(self, kind: Kind, item: Object) -> None:
        for listener in self.listeners:
            try:
                listener(kind, item)
            except Exception:  # one object must not keep the others from being heard of
                name = item["metadata"].get("name")
                logger.exception("a change of %s %s was not understood", kind.kind, name)
