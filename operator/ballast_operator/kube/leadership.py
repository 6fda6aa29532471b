"""Leader election on a Lease, with fencing.

One replica leads. It renews its Lease; another takes over when the Lease has not changed for its
duration *as that replica's own clock saw it* (clocks of machines are never compared). The leader
writes only while its last renewal is fresh (:meth:`Leadership.check`):

- a renewal counts from when it was asked for, a follower counts from when it has seen it, which is later: the
  fence falls ``lease_seconds - fence_seconds`` before anybody else can lead, as long as two clocks do not run
  at speeds that differ by more than that part of the duration;
- what a fenced leader still has under way is harmless: status writes carry the resourceVersion they were
  decided on, pods have deterministic names, deletions carry uids.

A leader that is fenced goes on trying to renew. Each renewal is a write on the version of its last one: where
it lands, nobody has held the Lease meanwhile, and the term goes on as after a pause. Where the Lease has
changed in any other way, the term is over.

Where the API server answers slowly, a Lease is asked for that lasts for several of its answers, with a
fence in proportion; followers wait for what is written in it. At the next quick answer it is short again.

It renews on an event loop of its own (:mod:`ballast_operator.tasks`), so that no load on the main loop
delays it. While the main loop does not turn at all, it does not renew: another replica should lead then.
"""

import asyncio
import contextlib
import datetime
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from ballast_operator.api import meta
from ballast_operator.errors import Conflict, Fenced, Forbidden, NotFound, NotLeader, Rejected, Unavailable
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import LEASE, Object
from ballast_operator.settings import MOST_LEASE_SECONDS, LeaderSettings
from ballast_operator.waits import WaitReason, Waits

LEASE_NAME = meta.LEADER_LEASE
"""Name of the Lease that the leader holds."""

AGAIN_SECONDS = 0.2
"""Pause before a renewal that failed is repeated."""

ANSWERS, LONGEST_LEASE_SECONDS = 4, 40.0
"""Length of a Lease in answers as slow as the last one; and at most."""

RELEASE_ATTEMPTS = 3
"""Attempts to give the Lease back; after that its duration has to pass."""

logger = logging.getLogger(__name__)


class Leadership:
    """This replica's part in the election. ``cluster`` must be unfenced: fencing rests on renewing.

    :meth:`check` and :attr:`leads` may be asked from any thread; everything else runs on one event loop.
    ``cluster`` is a connection of its own, and ``identity`` unique. While this replica is not ``alive``, the
    Lease is not renewed. ``clock``: seconds that never go back. ``epoch``: since 1970, for those who read the
    Lease.

    Attributes:
        replaced: another replica was seen to hold the Lease after this one had led.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        identity: str,
        settings: LeaderSettings,
        waits: Waits | None = None,
        alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._identity = identity
        self._settings = settings
        self._waits = waits if waits is not None else Waits()
        self._alive = alive
        self._clock = clock
        self._epoch = epoch
        self._turn = asyncio.Lock()
        self.replaced = False
        self._led = False
        self._renewed: float | None = None
        self._until = 0.0
        self._answer_seconds = 0.0
        self._seen: tuple[str, float] | None = None
        self._seen_seconds = settings.lease_seconds
        self._held: Object | None = None

    @property
    def leads(self) -> bool:
        """True if the last renewal is fresh enough to write."""
        return self._renewed is not None and self._clock() < self._until

    def check(self) -> None:
        """The fence in front of every write.

        Raises:
            Fenced: this replica could not renew its Lease for too long; it may again.
            NotLeader: it does not lead.
        """
        if self._renewed is None:
            raise NotLeader(f"{self._identity} does not hold lease {self._namespace}/{LEASE_NAME}")
        if not self.leads:
            raise Fenced(f"lease {self._namespace}/{LEASE_NAME} is not renewed for now; nothing is written")

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        while not await self.attempt():  # noqa: ASYNC110 - polls the API server
            await asyncio.sleep(self._until_free())

    async def hold(self) -> None:
        """Renew until the lease is lost or the task is cancelled.

        Raises:
            NotLeader: the lease was lost; all work has to end before this replica stands by again.
        """
        fenced = False
        while True:
            # A renewal that failed is repeated at once: two such pauses, and the fence would fall.
            late = self._clock() - (self._renewed or 0.0) >= 2 * self._settings.renew_seconds
            await asyncio.sleep(AGAIN_SECONDS if late and self._alive() else self._settings.renew_seconds)
            if not self._alive():
                logger.error(
                    "leader lease not renewed, as the main loop is stuck identity=%s", self._identity
                )
            else:
                try:
                    async with asyncio.timeout(self._asked_seconds), self._turn:
                        await self._renew()
                except TimeoutError:
                    logger.debug("leader lease not renewed in time identity=%s", self._identity)
            try:
                self.check()
            except Fenced as error:
                if not fenced:
                    logger.warning("leader lease lapsed, writes wait: %s identity=%s", error, self._identity)
                fenced = True
                self._waits.begin(
                    WaitReason.API_SERVER,
                    str(error),
                    to_fix="see that the API server runs, and what slows it or this replica down",
                    subject=LEASE_NAME,
                )
            else:
                self._waits.end(WaitReason.API_SERVER, LEASE_NAME)
                if fenced:
                    logger.warning("leader lease renewed after a lapse identity=%s", self._identity)
                fenced = False

    async def release(self) -> None:
        """Give the lease back, so that another replica need not wait; harmless where it is lost already."""
        async with self._turn:
            held, self._renewed, self._held = self._held, None, None
            if not self._led:
                return
            for _ in range(RELEASE_ATTEMPTS):
                try:
                    if held is None:  # e.g. the answer to the last renewal was lost
                        held = await self._read()
                    if held is None or held["spec"].get("holderIdentity") != self._identity:
                        return
                    spec = {**held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._cluster.replace(LEASE, {**held, "spec": spec})
                    return
                except (Conflict, NotFound):
                    held = None
                except (Unavailable, Rejected) as error:
                    logger.info("leader lease not released: %s", error)

    async def _renew(self) -> None:
        """Renewal by one request where nothing has changed: the Lease as last written, with a new time."""
        if self._held is not None:
            try:
                await self._lead_on(self._held)
            except (Conflict, NotFound):
                self._held = None  # e.g. the answer to the last renewal was lost
            except (Unavailable, Rejected) as error:
                logger.debug("leader lease: %s", error)
                return
            else:
                return
        await self._attempt()

    async def attempt(self) -> bool:
        """Take the lease if it is free, and keep it; says whether this replica leads."""
        leads = await self._attempt()
        if leads:
            logger.info("leader elected identity=%s lease=%s/%s", self._identity, self._namespace, LEASE_NAME)
        return leads

    def _until_free(self) -> float:
        """Seconds until the next attempt: half a renewal, or less where the lease runs out before."""
        pause = self._settings.renew_seconds / 2
        if self._seen is None:
            return pause
        left = self._seen_seconds - (self._clock() - self._seen[1])
        return min(pause, left) if left > 0 else pause

    async def _attempt(self) -> bool:
        current: Object | None = None
        try:
            current = await self._read()
            if current is not None and not self._free(current):
                self._stand_by(current)
                return False
            if self._renewed is not None and not self.leads and not self._is_own(current):
                self._renewed = None
                return False
            await self._lead_on(current)
        except NotFound:
            self._renewed = None
            if current is None:  # a Lease that was to be created
                self._no_lease(f"there is no namespace {self._namespace} for the leader's Lease {LEASE_NAME}")
            return False
        except Conflict:
            self._renewed = None
            return False
        except (Unavailable, Forbidden) as error:  # the client's on_answer records them
            logger.debug("leader lease: %s", error)
            return self.leads
        except Rejected as error:  # e.g. a namespace that is being deleted
            self._no_lease(f"the leader's Lease is refused: {error}")
            return self.leads
        self._waits.end(WaitReason.NAMESPACE)
        self._waits.end(WaitReason.LEADER)
        self._led = True
        return True

    def _no_lease(self, what: str) -> None:
        fix = f"kubectl create namespace {self._namespace}, or choose another one"
        self._waits.begin(
            WaitReason.NAMESPACE, what, to_fix=f"{fix} with --lease-namespace or BALLAST_NAMESPACE"
        )

    def _stand_by(self, lease: Object) -> None:
        self.replaced = self.replaced or self._led
        self._renewed = None
        self._waits.end(WaitReason.NAMESPACE)
        spec = lease["spec"]
        self._waits.begin(
            WaitReason.LEADER,
            f"{spec['holderIdentity']} leads; it renewed lease {self._namespace}/{LEASE_NAME} at "
            f"{spec.get('renewTime', 'an unknown time')}, this replica stands by",
        )

    async def _read(self) -> Object | None:
        try:
            with self._timed():
                return await self._cluster.get(LEASE, self._namespace, LEASE_NAME)
        except NotFound:
            return None

    def _free(self, lease: Object) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._identity):
            return True
        version = lease["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._clock())
        stated = float(spec.get("leaseDurationSeconds") or self._settings.lease_seconds)
        self._seen_seconds = min(stated, MOST_LEASE_SECONDS)
        return self._clock() - self._seen[1] >= self._seen_seconds

    def _is_own(self, lease: Object | None) -> bool:
        """True if this replica was the last to write the Lease: nobody has led since."""
        return lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity

    @property
    def _asked_seconds(self) -> float:
        """Seconds that the Lease asked for next lasts."""
        slow = min(ANSWERS * self._answer_seconds, LONGEST_LEASE_SECONDS)
        return max(self._settings.lease_seconds, slow)

    def _fence_of(self, lease_seconds: float) -> float:
        return lease_seconds * self._settings.fence_seconds / self._settings.lease_seconds

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """A request, which leaves time for another before the fence falls, and how long it took."""
        fence = self._fence_of(self._asked_seconds)
        self._cluster.request_seconds = max(fence - self._settings.renew_seconds, fence / 2)
        started = self._clock()
        try:
            yield
        finally:
            self._answer_seconds = self._clock() - started

    async def _lead_on(self, current: Object | None) -> None:
        started = self._clock()
        until = started + self._fence_of(self._asked_seconds)
        # Where its answer is lost, a follower may know of it, and that it is shorter than the one before.
        self._until = min(self._until, until)
        self._held = await self._take(current)
        self._renewed, self._until = started, until

    async def _take(self, current: Object | None) -> Object:
        at = datetime.datetime.fromtimestamp(self._epoch(), datetime.UTC)
        now = at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = dict((current or {}).get("spec") or {})
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            terms = int(spec.get("leaseTransitions") or 0) + (1 if current else 0)
            spec["leaseTransitions"] = terms % 2**31  # an int32, which anybody may have set
        spec |= {
            "holderIdentity": self._identity,
            "renewTime": now,
            "leaseDurationSeconds": max(1, math.ceil(self._asked_seconds)),
        }
        with self._timed():
            if current is not None:
                return await self._cluster.replace(LEASE, {**current, "spec": spec})
            metadata = {"namespace": self._namespace, "name": LEASE_NAME}
            return await self._cluster.create(LEASE, LEASE.object(metadata=metadata, spec=spec))
