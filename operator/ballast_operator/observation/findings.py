"""Facts about jobs that passes have learned and no object says: passes write them, views are made with them.

Service accounts, roles and bindings are not watched; after a takeover they are looked at once more.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import Blocked, JobView

AVOIDED_SECONDS = 600.0
"""How long a job is not started on a node on which its pods did not run in time, if there are others."""

MOST_AVOIDED = 64
"""Nodes that a job avoids at a time."""

MOST_REPORTS = 20_000
"""Reports that are kept from one decision to the next."""


class Found(NamedTuple):
    """Fields of a job's view that no object says; see :class:`JobView`."""

    avoided: frozenset[str] = frozenset()
    blocked: Blocked | None = None
    lacks_rights: bool = False
    lacks_account: bool = False


_NOTHING, _LAUNCHED = Found(), Found(lacks_rights=True, lacks_account=True)


@dataclasses.dataclass(slots=True)
class _OfJob:
    """What is known of one job: of the launch that has rights or an account, of the generation blocked."""

    uid: str
    rights_of: int = 0
    account_of: int = 0
    blocked: tuple[int, Blocked] | None = None
    avoided: dict[str, float] = dataclasses.field(default_factory=dict)


class Findings:
    """What passes have learned of all jobs.

    Args:
        clock: seconds that never go back.

    Attributes:
        reservations: launches whose writing is under way: their GPUs are taken.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[Key, _OfJob] = {}
        self._reports: deque[JobView] = deque(maxlen=MOST_REPORTS)
        self.reservations: dict[Key, JobAllocation] = {}

    def of(self, view: JobView) -> Found:
        """What is known now of the job of ``view``."""
        known = self._jobs.get(view.key)
        if known is None or known.uid != view.uid:
            return _LAUNCHED if view.launch else _NOTHING
        return Found(
            avoided=self._avoided(known),
            blocked=known.blocked[1] if known.blocked and known.blocked[0] == view.generation else None,
            lacks_rights=bool(view.launch) and known.rights_of != view.launch,
            lacks_account=bool(view.launch) and view.launch not in (known.rights_of, known.account_of),
        )

    def avoid(self, view: JobView, nodes: Iterable[str]) -> None:
        """Do not start the job on these nodes for a while, if there are others."""
        avoided = self._of(view).avoided
        avoided.update(dict.fromkeys(nodes, self._clock() + AVOIDED_SECONDS))
        for node in sorted(avoided, key=lambda name: avoided[name])[:-MOST_AVOIDED]:
            del avoided[node]

    def block(self, view: JobView, why: Blocked | None) -> bool:
        """Remember why the job cannot be launched, for this generation of it; says whether that is news."""
        if why is not None or view.key in self._jobs:
            self._of(view).blocked = None if why is None else (view.generation, why)
        return why != view.blocked

    def rights_granted(self, view: JobView) -> None:
        """What the pods of the job's launch need in order to report has been made."""
        self._of(view).rights_of = view.launch

    def account_made(self, view: JobView, launch: int) -> None:
        """The service account of a launch that is being written has been made."""
        self._of(view).account_of = launch

    def saw(self, view: JobView) -> None:
        """Keep a job as a pass has seen it: its report is measured at the next decision."""
        if view.lease is not None and view.lease.report is not None:
            self._reports.append(view)

    def take_reports(self) -> list[JobView]:
        """Jobs with reports since the last time, for the one reader that measures them."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._jobs.pop(key, None)
        self.reservations.pop(key, None)

    def _of(self, view: JobView) -> _OfJob:
        known = self._jobs.get(view.key)
        if known is None or known.uid != view.uid:
            known = self._jobs[view.key] = _OfJob(view.uid)
        return known

    def _avoided(self, known: _OfJob) -> frozenset[str]:
        if not known.avoided:
            return frozenset()
        now = self._clock()
        return frozenset(node for node, until in known.avoided.items() if until > now)
