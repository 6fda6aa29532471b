"""Kubernetes Events: one when a condition flips, one for each notice; never the same twice in a row."""

import asyncio
import dataclasses
import logging
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable

from ballast_operator.api.base import Condition
from ballast_operator.api.conditions import TOLD, JobCondition, JobReason, Told
from ballast_operator.errors import NAMESPACE_ENDS, Conflict, NotFound, Rejected, Unavailable
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import EVENT, Kind
from ballast_operator.views.clock import now, show

COMPONENT = "ballast-operator"
"""Reporter of Events, as ``kubectl describe`` shows it."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventToPost:
    """An Event to come: ``type`` is Normal or Warning."""

    type: str
    reason: str
    message: str


BEGINS = ("", JobReason.PENDING.value)
"""(status, reason) of a condition that is not there yet."""


def flips(old: Iterable[Condition], new: Iterable[Condition]) -> tuple[EventToPost, ...]:
    """A notice for each condition whose truth or reason has changed."""
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    found = []
    for condition in new:
        was, told = before.get(condition.type, BEGINS), TOLD.get(condition.reason, Told.NORMALLY)
        if was == (condition.status, condition.reason) or told is Told.NEVER:
            continue
        if told is Told.NOT_AT_FIRST and was[1] == JobReason.PENDING:
            continue
        warns = told is Told.WARNING or condition.type == JobCondition.FAILED
        message = f"{condition.type} is {condition.status}: {condition.message}"
        found.append(
            EventToPost(type="Warning" if warns else "Normal", reason=condition.reason, message=message)
        )
    return tuple(found)


MOST_WAITING = 2000
"""Events that may wait to be posted in the background; then the oldest are dropped."""


class Recorder:
    """Posts Events in the background: no launch waits for one.

    An Event is a courtesy: one that cannot be posted is logged and forgotten.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._waiting: deque[tuple[Kind, str, str, str, tuple[EventToPost, ...]]] = deque(maxlen=MOST_WAITING)
        self._arrived = asyncio.Event()
        self._drops = False

    async def run(self) -> None:
        """Post what waits, one after the other, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self.post_waiting()

    async def post_waiting(self) -> None:
        """Post what waits now."""
        while self._waiting:
            await self._post(*self._waiting.popleft())
        self._drops = False

    def post(self, kind: Kind, namespace: str, name: str, uid: str, notices: Iterable[EventToPost]) -> None:
        """Have notices about one object posted, without those that repeat the last one of their reason."""
        notices = tuple(notices)
        if not notices:
            return
        if len(self._waiting) == MOST_WAITING and not self._drops:
            self._drops = True  # told of once, however many follow
            logger.warning("more than %d events wait; the oldest are dropped", MOST_WAITING)
        self._waiting.append((kind, namespace, name, uid, notices))
        self._arrived.set()

    async def _post(
        self, kind: Kind, namespace: str, name: str, uid: str, notices: Iterable[EventToPost]
    ) -> None:
        for notice in notices:
            if self._last.get((uid, notice.reason)) == notice.message:
                continue
            self._last[(uid, notice.reason)] = notice.message
            self._last.move_to_end((uid, notice.reason))
            while len(self._last) > 10_000:
                self._last.popitem(last=False)
            time = show(now())
            where = {"namespace": namespace} if namespace else {}
            body = EVENT.object(
                metadata={"namespace": namespace or "default", "name": f"{name}.{uuid.uuid4().hex[:16]}"},
                involvedObject=kind.object(name=name, uid=uid, **where),
                type=notice.type,
                reason=notice.reason,
                message=notice.message[:1024],
                source={"component": COMPONENT},
                reportingComponent=COMPONENT,
                firstTimestamp=time,
                lastTimestamp=time,
                count=1,
            )
            try:
                await self._cluster.create(EVENT, body)
            except (Conflict, NotFound, Rejected, Unavailable) as error:
                level = (
                    logging.DEBUG if NAMESPACE_ENDS in str(error) else logging.INFO
                )  # the job is told once
                words = "event not posted object=%s/%s reason=%s: %s"
                logger.log(level, words, namespace, name, notice.reason, error)
