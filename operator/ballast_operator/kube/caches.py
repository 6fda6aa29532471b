"""Caches of the cluster's objects: one store a kind, fed by watches, lists and the operator's own writes.

A store keeps the newest version of each object by resourceVersion, so that feeds may overlap: the
answer to a write is in the store before the watch brings it, and an old watch event cannot undo it.
What lists contradict that were asked for later is not believed any more, whatever its resourceVersion.
Reading never blocks; objects are shared and must not be changed. They are pruned: see :mod:`.kept_fields`.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ballast_policies.contract.messages import JOB_LABEL

from ballast_operator.errors import Unavailable
from ballast_operator.kube.kept_fields import pinned_node, prune_fields
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
    is_ours,
    key_of,
    version_of,
)

K = TypeVar("K")

logger = logging.getLogger(__name__)

Known = tuple[dict[Key, int], dict[str, int]]
"""(the versions of a kind's objects; of its deleted ones, by UID)."""

Listener = Callable[[Kind, Object], None]
StoreListener = Callable[[Kind, Object | None, Object | None], None]
"""Takes (kind, the version that was known, the version that is known now)."""

WATCHED = (JOB, POLICY, POD, NODE, CONFIG_MAP, LEASE)
"""Kinds that are watched."""

SELECTORS = {CONFIG_MAP: JOB_LABEL, LEASE: JOB_LABEL}
"""Kinds of which only labelled objects are watched."""

DOUBT_SECONDS = 10.0
"""Seconds until lists older than what is known are believed: less than a gang takes to be hung."""


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
        """Keep ``item`` unless a newer version, or its deletion, is known; says whether it was kept.

        Jobs of other controllers (``spec.managedBy``) are not: nothing here is to know of them.
        """
        if not self.lacks(item) or (self._kind is JOB and not is_ours(item)):
            return False
        key = key_of(item)
        known = self._objects.get(key)
        self._forget(key)
        item = self._objects[key] = prune_fields(self._kind, item)
        job = job_of(item)
        if job is not None:
            self._by_job[job].add(key)
        if job is None or not controlled_by_job(item, job[1]):
            self._of_no_job.add(key)
        if self._kind is POD and (node := pinned_node(item)):
            self._by_node[node].add(key)
        self._stored(self._kind, known, item)
        return True

    def lacks(self, item: Object) -> bool:
        """True if ``item``, of which metadata is enough, is newer than the cached version."""
        # An object that leaves a watch's selector is told of as deleted, and may come back.
        if version_of(item) <= self._deleted.get(item["metadata"].get("uid", ""), -1):
            return False
        known = self._objects.get(key_of(item))
        return known is None or version_of(known) < version_of(item)

    def remove(self, item: Object, version: int | None = None) -> bool:
        """The object with this uid is gone, as of ``version``; None: of its own."""
        key, uid = key_of(item), item["metadata"].get("uid", "")
        self._deleted[uid] = version_of(item) if version is None else max(version, version_of(item))
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

    def known(self) -> Known:
        """Versions that a list requested now shows, or newer ones."""
        return {key: version_of(item) for key, item in self._objects.items()}, dict(self._deleted)

    def contradicted(self, known: Known, present: Iterable[Object], version: int) -> list[Object]:
        """Objects of a list that contradict what was ``known`` when it was requested.

        A list says what is true when it is asked for: what was known then in a newer version was told of
        wrongly, or the API server's storage was set back to a backup.
        """
        (versions, deleted), listed = known, {key_of(item): item for item in present}
        found = []
        for item in listed.values():
            uid = item["metadata"].get("uid", "")
            if version_of(item) <= deleted.get(uid, -1) == self._deleted.get(uid):
                found.append(item)
        for key, own in versions.items():
            shown, now = listed.get(key), self._objects.get(key)
            newer = own > (version if shown is None else version_of(shown))
            if newer and now is not None and version_of(now) == own:
                found.append(now)
        return found

    def disbelieve(self, item: Object) -> None:
        """Forget what is known of an object as of :meth:`contradicted`, or that it is gone."""
        self._deleted.pop(item["metadata"].get("uid", ""), None)
        if self._objects.get(key_of(item)) is item:
            self._forget(key_of(item))
            self._stored(self._kind, item, None)

    def _forget(self, key: Key) -> None:
        known = self._objects.pop(key, None)
        if known is None:
            return
        self._of_no_job.discard(key)
        job = job_of(known)
        if job is not None:
            _discard(self._by_job, job, key)
        if self._kind is POD and (node := pinned_node(known)):
            _discard(self._by_node, node, key)


def _discard(index: defaultdict[K, set[Key]], at: K, key: Key) -> None:
    index[at].discard(key)
    if not index[at]:
        del index[at]


def controlled_by_job(item: Object, job: str) -> bool:
    """True if a TrainingJob of this name is the controller of ``item``."""
    return any(
        owner.get("controller") and owner.get("kind") == JOB.kind and owner.get("name") == job
        for owner in item["metadata"].get("ownerReferences") or []
    )


def job_of(item: Object) -> Key | None:
    """The job whose label the object carries, whoever controls it; None: it carries none."""
    metadata = item["metadata"]
    name = (metadata.get("labels") or {}).get(JOB_LABEL)
    return (metadata.get("namespace", ""), name) if name else None


class Caches:
    """The stores, and who wants to hear of changes.

    Attributes:
        listeners: hear of changes that others made: watches and lists bring them.
        store_listeners: hear of every change of a store, own writes included, first.
        listed_at: the version of the last list of a kind that was taken in whole.
        doubted: kind -> (since when its lists are older than what is known, the newest version that is).
        set_back: a list has contradicted what was known: watches are to begin anew, each with a list.
        past: how often that was: what was worked out before is of another past.
    """

    def __init__(self) -> None:
        self.stores: dict[Kind, Store] = {kind: Store(kind, self._stored) for kind in WATCHED}
        self.listeners: list[Listener] = []
        self.store_listeners: list[StoreListener] = []
        self.last_event: dict[Kind, float] = {}
        self.lagging_since: dict[Kind, float] = {}
        self.listed_at: dict[Kind, int] = {}
        self.doubted: dict[Kind, tuple[float, int]] = {}
        self.set_back = asyncio.Event()
        self.past = 0

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

    def doubt(self, kind: Kind, known: Known, present: list[Object], version: int) -> bool:
        """Forget what a list contradicts before it is taken in (:meth:`Store.contradicted`).

        Says whether it contradicts anything. ``present``: at least metadata of all.

        Raises:
            Unavailable: the list is older than what was known. One may come from a proxy, or from a replica
                of the API server that lags behind; it is believed once lists have been as old for
                :data:`DOUBT_SECONDS`, and nothing newer than was known has come meanwhile.
        """
        store, now = self.stores[kind], time.monotonic()
        contradicted = store.contradicted(known, present, version)
        newest = max((own for versions in known for own in versions.values()), default=0)
        if contradicted and version < newest:
            since, before = self.doubted.get(kind, (now, newest))
            since = now if newest > before else since
            self.doubted[kind] = since, newest
            if now - since < DOUBT_SECONDS:
                raise Unavailable(
                    f"a list of version {version} is older than what is known, of version {newest}"
                )
        self.doubted.pop(kind, None)
        if contradicted:
            self.listed_at.clear()
            self.set_back.set()
            self.past += 1
            logger.warning(
                "%d %s were known otherwise than a list shows them: the list is believed",
                len(contradicted),
                kind.plural,
            )
        for item in contradicted:
            store.disbelieve(item)
            self._tell(kind, item)
        return bool(contradicted)

    def listed(
        self, kind: Kind, items: list[Object], version: int, *, present: list[Object] | None = None
    ) -> int:
        """Take in a fresh list; returns how many objects the watch had not delivered.

        ``present``: metadata of all that there are, where ``items`` are only those that the caches lacked.
        """
        changed = [item for item in items if self.stores[kind].put(item)]
        gone = self.left_out(kind, items if present is None else present, version)
        watched = kind in self.listed_at  # a watch begins with the first list
        self.listed_at[kind] = version
        if watched and (changed or gone):
            self.lagging_since.setdefault(kind, time.monotonic())
        else:
            self.lagging_since.pop(kind, None)
        for item in changed:
            self._tell(kind, item)
        return len(changed) + len(gone)

    def left_out(self, kind: Kind, present: list[Object], version: int) -> list[Object]:
        """Forget, and return, what a fresh list does not have; ``present``: at least the UIDs of all."""
        store = self.stores[kind]
        gone = [item for item in store.missing_from(present, version) if store.remove(item, version)]
        for item in gone:
            self._tell(kind, item)
        return gone

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
