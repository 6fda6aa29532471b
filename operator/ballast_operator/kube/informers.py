"""Watches and caches of a replica, from its start to its end, whether it leads or not.

A follower watches too, so that a takeover finds its caches filled. It only reads: nothing here writes, and
the client's fence refuses what is not a read.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Iterable

from ballast_operator.errors import NotFound, Rejected, Unavailable
from ballast_operator.kube.caches import WATCHED, Caches
from ballast_operator.kube.client import METADATA, Cluster, is_missing
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, POD, Kind, key_of
from ballast_operator.kube.reflector import Reflector, Where, where
from ballast_operator.metrics import Metrics
from ballast_operator.settings import ApiSettings
from ballast_operator.tasks import keep_running
from ballast_operator.waits import WaitReason, Waits

FIRST_RESYNC_SECONDS = 5.0
"""Seconds from the first list to the second; the pauses double from there."""

FOLLOWER_RESYNC = 10.0
"""Factor of a follower's pauses between two lists: it lists once more when it leads."""

FREEZE_SECONDS = 5.0
"""Seconds between two looks whether new objects are many enough to be kept from the collector."""

GROWTH, LEAST_GROWTH = 1.25, 500
"""Growth of the objects from which on new ones are kept from the collector: a quarter, and this many."""

FIRST_PAUSE_SECONDS = 1.0
"""Pause before lists that failed are tried again; doubled each time."""

LONGEST_PAUSE_SECONDS = 5.0
"""Longest pause between two tries to list everything."""

READ_SINGLY = (JOB, POD, CONFIG_MAP, LEASE)
"""Kinds of which the operator's account may read one object."""

MOST_READ_SINGLY = 100
"""Objects that are read one by one; of more, a whole list costs less."""

INSTALL_DEFINITIONS = (
    "ballast crds --output-dir - | kubectl apply --server-side -f -, or install the Helm chart"
)
"""Remedy where the API server does not have Ballast's kinds as this release does."""

logger = logging.getLogger(__name__)


class Informers:
    """Watches and lists that keep the caches up to date.

    ``cluster`` is only read. ``namespace``: whose jobs are watched; empty: all. ``settings``: how often
    lists are compared, and how long a request may take.

    Attributes:
        caches: what is known.
        leads: whether this replica leads; a follower lists less often.
        namespace: of the jobs that are watched; empty: all.
        metrics, waits: of the process.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        settings: ApiSettings,
        metrics: Metrics,
        waits: Waits,
    ) -> None:
        self.caches = Caches()
        self.leads = False
        self._cluster = cluster
        self.namespace = namespace
        self._settings = settings
        self.metrics = metrics
        self.waits = waits
        self._frozen = 0
        self._listed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """List everything, and watch from then on; harmless where that has begun."""
        if not self._tasks:
            parts = (
                ("list", self._list),
                ("resync", self._resync),
                ("watch", self._watch),
                ("freeze", self._freeze_what_arrives),
            )
            self._tasks = [
                asyncio.create_task(keep_running(name, part, metrics=self.metrics)) for name, part in parts
            ]

    async def refresh(self) -> None:
        """Wait until the caches have everything that was written before this call.

        A new leader asks for it once its Lease is its own: a watch may be behind what the last leader wrote.
        Of objects that the caches have in their newest version only the list is read.
        """
        begun = bool(self._tasks)
        self.start()
        await self._listed.wait()
        if begun:
            what = "this replica leads, and lists the cluster's objects once more"
            await list_until_complete(self.caches, self._cluster, self.namespace, self.waits, what=what)

    async def stop(self) -> None:
        """End the watches and lists."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _list(self) -> None:
        what = "the cluster's objects are being listed for the first time"
        await list_until_complete(self.caches, self._cluster, self.namespace, self.waits, what=what)
        known = ", ".join(f"{len(store)} {kind.plural}" for kind, store in self.caches.stores.items())
        logger.info("listed %s", known)
        self._freeze()
        self._listed.set()

    def _freeze(self) -> None:
        """Keep the collector from walking through what stays for long, again and again.

        With 5,000 jobs each of its full walks stops everything for 0.2 s, and a decision causes one. What was
        kept before is not walked through: its values have no cycles, and are freed without it.
        """
        gc.collect()
        gc.freeze()
        self._frozen = self._size()

    def _size(self) -> int:
        return sum(map(len, self.caches.stores.values()))

    async def _freeze_what_arrives(self) -> None:
        await self._listed.wait()
        while True:
            await asyncio.sleep(FREEZE_SECONDS)
            if self._size() > GROWTH * self._frozen + LEAST_GROWTH:
                self._freeze()

    async def _resync(self) -> None:
        """Compare with fresh lists. ``/healthz`` fails where a watch stays behind what lists show.

        The first ones follow quickly: what is deleted after the first list and before a watch has begun
        is told by no event.
        """
        await self._listed.wait()
        every = self._settings.resync_seconds
        pause, last = min(FIRST_RESYNC_SECONDS, every), time.monotonic()
        while True:
            doubts = bool(self.caches.doubted)
            await asyncio.sleep(min(FIRST_PAUSE_SECONDS, pause) if doubts else pause)
            follows_rarely = not (self.leads or doubts) and pause >= every
            if follows_rarely and time.monotonic() - last < FOLLOWER_RESYNC * every:
                continue
            pause, last = min(2 * pause, every), time.monotonic()
            failed = await resync(self.caches, self._cluster, self.namespace, self.waits)
            for kind in failed.keys() & self.caches.doubted.keys():
                logger.warning("%s: %s; they are listed anew", kind.plural, failed[kind])

    async def _watch(self) -> None:
        await self._listed.wait()
        while True:
            self.caches.set_back.clear()
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(Reflector(self.caches, self._cluster, kind, self.namespace).run())
                    for kind in WATCHED
                ]
                await self.caches.set_back.wait()
                for watch in watches:
                    watch.cancel()


async def resync(
    caches: Caches, cluster: Cluster, namespace: str, waits: Waits, kinds: Iterable[Kind] = WATCHED
) -> dict[Kind, str]:
    """List everything into the caches, what watches have lost too; returns failed kinds, with why."""
    errors = {}
    for kind in kinds:
        try:
            await _list(caches, cluster, kind, where(kind, namespace))
        except NotFound as error:
            errors[kind] = str(error)
            waits.begin(
                WaitReason.DEFINITIONS,
                f"the API server does not know {kind.plural} of {kind.api_version}",
                to_fix=INSTALL_DEFINITIONS,
                subject=kind.plural,
            )
        except (Unavailable, Rejected) as error:
            errors[kind] = str(error)
        else:
            waits.end(WaitReason.DEFINITIONS, kind.plural)
    if namespace and not errors:
        await _look_for_namespace(cluster, namespace, waits)
    return errors


async def _list(caches: Caches, cluster: Cluster, kind: Kind, asked: Where) -> None:
    """List of metadata of many objects that are mostly known, and of those that the caches lack."""
    store = caches[kind]
    known = store.known()
    if kind in READ_SINGLY and len(store) > MOST_READ_SINGLY:
        present, version = await cluster.list(kind, **asked, accept=METADATA)
        caches.doubt(kind, known, present, version)
        lacking = [key_of(item) for item in present if store.lacks(item)]
        if len(lacking) <= MOST_READ_SINGLY:
            items = []
            for key in lacking:
                with contextlib.suppress(NotFound):  # deleted since
                    items.append(await cluster.get(kind, *key))
            caches.listed(kind, items, version, present=present)
            return
    items, version = await cluster.list(kind, **asked)
    caches.doubt(kind, known, items, version)
    caches.listed(kind, items, version)


async def _look_for_namespace(cluster: Cluster, namespace: str, waits: Waits) -> None:
    """Without it every list is empty, and no error."""
    try:
        if not await is_missing(cluster, namespace):
            waits.end(WaitReason.NAMESPACE, namespace)
            return
    except Unavailable:
        return
    waits.begin(
        WaitReason.NAMESPACE,
        f"the namespace {namespace} of the jobs does not exist",
        to_fix=f"kubectl create namespace {namespace}, or start the operator with another --namespace",
        subject=namespace,
    )


async def list_until_complete(
    caches: Caches, cluster: Cluster, namespace: str, waits: Waits, *, what: str
) -> None:
    """:func:`resync` until every kind has been listed once; ``what``: is waited for, as a sentence."""
    waits.begin(WaitReason.CACHES, what)
    pause, left = FIRST_PAUSE_SECONDS, dict.fromkeys(WATCHED, "")
    while left := await resync(caches, cluster, namespace, waits, left):
        waits.begin(WaitReason.CACHES, f"{what}; not listed yet: {'; '.join(left.values())}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    waits.end(WaitReason.CACHES)
