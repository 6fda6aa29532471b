"""What a replica knows of the cluster, from its start to its end, whether it leads or not.

A follower watches too, so that a takeover finds its caches filled. It only reads: nothing here writes, and
the client's fence refuses what is not a read.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import kopf
from kopf._cogs.structs.references import Insights

from ballast_operator.errors import Unavailable
from ballast_operator.kube.caches import WATCHED, Caches
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.streams import list_until_complete, resync, watch_registry, watch_settings
from ballast_operator.metrics import Metrics
from ballast_operator.settings import ApiSettings
from ballast_operator.tasks import keep_running
from ballast_operator.waits import Waits

FIRST_RESYNC_SECONDS = 5.0
"""From the first list to the second; the pauses double from there."""

FOLLOWER_RESYNC = 10.0
"""How much longer a follower's pauses between two lists are: it lists once more when it leads."""

FREEZE_SECONDS = 5.0
"""Between two looks whether new objects are many enough to be kept from the collector."""

GROWTH, LEAST_GROWTH = 1.25, 500
"""That is: a quarter more, and this many."""

_KOPF = Path(kopf.__file__).parent

logger = logging.getLogger(__name__)


class Informers:
    """Watches and lists that keep the caches up to date.

    Args:
        cluster: where from; only read.
        namespace: whose jobs are watched; empty: all.
        settings: how often lists are compared, and how long a request may take.
        metrics, waits: of the process.
        take_signals: called once kopf has taken the process' signals, to take them back.

    Attributes:
        caches: what is known.
        leads: whether this replica leads; a follower lists less often.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        settings: ApiSettings,
        metrics: Metrics,
        waits: Waits,
        take_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self.caches = Caches()
        self.leads = False
        self._cluster = cluster
        self._namespace = namespace
        self._settings = settings
        self._metrics = metrics
        self._waits = waits
        self._take_signals = take_signals
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
                asyncio.create_task(keep_running(name, part, metrics=self._metrics)) for name, part in parts
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
            await list_until_complete(self.caches, self._cluster, self._namespace, self._waits, what=what)

    async def stop(self) -> None:
        """End the watches and lists."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _list(self) -> None:
        what = "the cluster's objects are being listed for the first time"
        await list_until_complete(self.caches, self._cluster, self._namespace, self._waits, what=what)
        known = ", ".join(f"{len(store)} {kind.plural}" for kind, store in self.caches.stores.items())
        logger.info("listed %s", known)
        self._freeze()
        self._listed.set()

    def _freeze(self, *, again: bool = False) -> None:
        """Keep the collector from walking through what stays for long, again and again.

        With 5,000 jobs each of its full walks stops everything for 0.2 s, and a decision causes one. What was
        kept before is not walked through (``again``): its values have no cycles, and are freed without it.
        """
        if not again:
            gc.unfreeze()
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
                self._freeze(again=True)

    async def _resync(self) -> None:
        """Compare with fresh lists. ``/healthz`` fails where a watch stays behind what lists show.

        The first ones follow quickly: what is deleted after the first list and before a watch has begun
        is told by no event.
        """
        await self._listed.wait()
        every = self._settings.resync_seconds
        pause, last = min(FIRST_RESYNC_SECONDS, every), time.monotonic()
        while True:
            await asyncio.sleep(pause)
            follows_rarely = not self.leads and pause >= every
            if follows_rarely and time.monotonic() - last < FOLLOWER_RESYNC * every:
                continue
            pause, last = min(2 * pause, every), time.monotonic()
            await resync(self.caches, self._cluster, self._namespace, self._waits)

    async def _watch(self) -> None:
        await self._listed.wait()
        found = Insights()
        tasks = await kopf.spawn_tasks(
            registry=watch_registry(self.caches, self._cluster),
            settings=watch_settings(request_seconds=self._settings.request_seconds),
            clusterwide=not self._namespace,
            namespaces=[self._namespace] if self._namespace else [],
            standalone=True,
            insights=found,
        )
        self._take_signals()  # kopf has just taken them
        served = asyncio.create_task(_all_served(found))
        await kopf.run_tasks([*tasks, served], ignored=_OthersTasks())


async def _all_served(found: Insights) -> None:
    """Wait for ever where kopf has found all kinds: it asks once, and never watches what was not there then.

    Raises:
        Unavailable: the API server has not named one of them. Right after a definition was made it may list
            its objects and not yet say so.
    """
    await found.ready_resources.wait()
    there = {(resource.group, resource.plural) for resource in found.watched_resources}
    missing = [kind.plural for kind in WATCHED if (kind.group, kind.plural) not in there]
    if missing:
        raise Unavailable(f"the API server does not name {', '.join(missing)} among what it serves")
    await asyncio.Event().wait()


class _OthersTasks(Collection["asyncio.Task[object]"]):
    """The tasks of the loop that are not kopf's: at its end it would cancel them, too."""

    def __contains__(self, task: object) -> bool:
        code = getattr(task.get_coro(), "cr_code", None) if isinstance(task, asyncio.Task) else None
        return code is None or _KOPF not in Path(code.co_filename).parents

    def __iter__(self) -> "Iterator[asyncio.Task[object]]":
        return (task for task in asyncio.all_tasks() if task in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
