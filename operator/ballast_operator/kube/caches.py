"""What the operator knows of the world: one store a kind, fed by watches, by lists and by its own writes.

A store keeps the newest version of each object by resourceVersion, so that feeds may overlap: the
answer to a write is in the store before the watch brings it, and an old watch event cannot undo it.
Reading never blocks; objects are shared and must not be changed. They are slim: see :mod:`.slim`.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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
from ballast_operator.kube.pinning import pinned_node
from ballast_operator.kube.slim import slim

K = TypeVar("K")

logger = logging.getLogger(__name__)

Listener = Callable[[Kind, Object], None]
StoreListener = Callable[[Kind, Object | None, Object | None], None]
"""Takes (kind, the version that was known, the version that is known now)."""

WATCHED = (JOB, POLICY, POD, NODE, CONFIG_MAP, LEASE)
"""Kinds that are watched."""

SELECTORS = {CONFIG_MAP: JOB_LABEL, LEASE: JOB_LABEL}
"""Kinds of which only labelled objects are watched."""


class Store:
    """The objects of one kind; ``stored`` hears of every change, also of those that others made."""

    def __init__(self, kind: Kind, stored: StoreListener) -> None:
        self._kind = kind
        self._stored = stored
        self._objects: dict[Key, Object] = {}
        self._deleted: dict[str, int] = {}
        self._by_job: defaultdict[Key, set[Key]] = defaultdict(set)
        self._of_no_job: set[Key] = set()
        self._by_node: defaultdict[str, set[Key]] = defaultdict(set)

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

    def of_no_job(self) -> list[Object]:
        """Objects that no job controls, whatever their labels say, by name."""
        return [self._objects[item] for item in sorted(self._of_no_job)]

    def on_node(self, name: str) -> list[Object]:
        """Pods that are bound or pinned to the node, by name."""
        return [self._objects[item] for item in sorted(self._by_node.get(name, ()))]

    def put(self, item: Object) -> bool:
        """Keep ``item`` unless a newer version, or its deletion, is known; says whether it was kept."""
        if not self.lacks(item):
            return False
        key = key_of(item)
        known = self._objects.get(key)
        self._forget(key)
        item = self._objects[key] = slim(self._kind, item)
        job = _job_of(item)
        if job is not None:
            self._by_job[job].add(key)
        if job is None or not _controlled(item, job[1]):
            self._of_no_job.add(key)
        if self._kind is POD and (node := pinned_node(item)):
            self._by_node[node].add(key)
        self._stored(self._kind, known, item)
        return True

    def lacks(self, item: Object) -> bool:
        """Whether ``item``, of which metadata is enough, is newer than what is known of it."""
        if item["metadata"].get("uid", "") in self._deleted:
            return False
        known = self._objects.get(key_of(item))
        return known is None or version_of(known) < version_of(item)

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
        self._stored(self._kind, known, None)
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
        if known is None:
            return
        self._of_no_job.discard(key)
        job = _job_of(known)
        if job is not None:
            _discard(self._by_job, job, key)
        if self._kind is POD and (node := pinned_node(known)):
            _discard(self._by_node, node, key)


def _discard(index: defaultdict[K, set[Key]], at: K, key: Key) -> None:
    index[at].discard(key)
    if not index[at]:
        del index[at]


def _controlled(item: Object, job: str) -> bool:
    return any(
        owner.get("controller") and owner.get("kind") == JOB.kind and owner.get("name") == job
        for owner in item["metadata"].get("ownerReferences") or []
    )


def _job_of(item: Object) -> Key | None:
    metadata = item["metadata"]
    name = (metadata.get("labels") or {}).get(JOB_LABEL)
    return (metadata.get("namespace", ""), name) if name else None


class Caches:
    """All stores, and who wants to hear of changes.

    Attributes:
        listeners: hear of changes that others made: watches and lists bring them.
        store_listeners: hear of every change of a store, own writes included, first.
    """

    def __init__(self) -> None:
        self.stores: dict[Kind, Store] = {kind: Store(kind, self._stored) for kind in WATCHED}
        self.listeners: list[Listener] = []
        self.store_listeners: list[StoreListener] = []
        self.last_event: dict[Kind, float] = {}
        self.lagging_since: dict[Kind, float] = {}

    def __getitem__(self, kind: Kind) -> Store:
        return self.stores[kind]

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every object that is known, and from now on of changes that others make."""
        self.listeners.append(listener)
        for kind, store in self.stores.items():
            for item in store:
                _tell(listener, kind, item)

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

    def listed(
        self, kind: Kind, items: list[Object], version: int, *, present: list[Object] | None = None
    ) -> int:
        """Take in a fresh list; returns how many objects the watch had not delivered.

        ``present``: metadata of all that there are, where ``items`` are only those that the caches lacked.
        """
        store = self.stores[kind]
        changed = [item for item in items if store.put(item)]
        gone = [
            item
            for item in store.missing_from(items if present is None else present, version)
            if store.remove(item)
        ]
        if changed or gone:
            self.lagging_since.setdefault(kind, time.monotonic())
        else:
            self.lagging_since.pop(kind, None)
        for item in changed + gone:
            self._tell(kind, item)
        return len(changed) + len(gone)

    def _stored(self, kind: Kind, old: Object | None, new: Object | None) -> None:
        for listener in self.store_listeners:
            listener(kind, old, new)

    def _tell(self, kind: Kind, item: Object) -> None:
        for listener in self.listeners:
            _tell(listener, kind, item)


def _tell(listener: Listener, kind: Kind, item: Object) -> None:
    try:
        listener(kind, item)
    except Exception:  # one object must not keep the others from being heard of
        logger.exception("a change of %s %s was not understood", kind.kind, item["metadata"].get("name"))
