"""The survivors of a lost rank: who is left and how they go on, agreed over a store that no rank serves.

Whoever notices a loss ends its own connections, so that the loss is noticed by all who wait for it, and says
that it is here.  Once each process of the group is here or gone, the first that is here decides for all, and
the first decision counts.  A process is gone once its parent has reaped it, which kills one whose heartbeats
have ended.  Where one has ended by an error of its own, the others would meet it, too: then none goes on.

In pods a killed process is started again under its name, tells that the one before it is gone, and the others
wait for it: all go on together, by the plan that they had.  Of a lost pod only the operator tells, by a plan
without it.  Each pod serves a store, and ranks meet at that of their plan's first pod: where that is lost, at
that of the plan without it.
"""

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ballast_trainer.distributed.connections import CONNECTIONS, Connections
from ballast_trainer.errors import PeerLost

_NEWS, _NONE_GOES_ON = "survivors/news", "survivors/none-goes-on"
_POLL_SECONDS = 0.02


def tell_name(store: Any, process: str) -> None:
    """Store the name of this process for its parent."""
    store.set(_named(os.getpid()), process)


def process_of(store: Any, pid: int) -> str | None:
    """The name of the rank's process with this id; None: it has not told yet."""
    key = _named(pid)
    return str(store.get(key).decode()) if store.check([key]) else None


class Fate(enum.StrEnum):
    """Fate of a process in the store."""

    ENTERED = "entered"
    """It is in a group of the job, or was."""
    HUNG = "hung"
    """It is not heard of any more: its parent is to kill it."""
    GONE = "gone"
    """It has been killed."""
    LEFT = "left"
    """It has ended well."""

    def key(self, process: str) -> str:
        """Key of a process with this fate."""
        return f"survivors/{self}/{process}"

    def tell(self, store: Any, process: str) -> None:
        """A process has it."""
        store.set(self.key(process), "")
        if self is Fate.GONE:
            store.add(_NEWS, 1)

    def is_of(self, store: Any, process: str) -> bool:
        """True if a process has it."""
        return bool(store.check([self.key(process)]))


def tell_none_goes_on(store: Any, reason: str) -> None:
    """A process has ended by an error of its own."""
    store.set(_NONE_GOES_ON, reason)
    store.add(_NEWS, 1)


def _named(pid: int) -> str:
    return f"survivors/process/{pid}"


def undecided(store: Any) -> int:
    """The first round, from 1, in which it is not decided yet how the job goes on."""
    number = 1
    while store.check([f"survivors/{number}/decision"]):
        number += 1
    return number


class Survivors:
    """This process among those of a job that goes on without lost ranks.

    Attributes:
        noticed: a loss after which its connections have been ended.
        agreeing: with the others on how to go on, one of which may have to start first.
        store_lost: the store does not answer any more.
    """

    def __init__(self, store: Any, process: str) -> None:
        """In no group yet; ``store`` outlives every rank."""
        self._connection = Connections()
        with self._connection.opening():
            # Its own: whoever waits for an answer here can be woken, too.
            self._store = store.clone()
        self._process = process
        tell_name(store, process)
        self._lock = threading.Lock()
        self._members: tuple[str, ...] = ()
        self._round = 1
        self._news = 0
        self._has_met = False
        self.noticed = self.agreeing = self.store_lost = False

    def at(self, store: Any) -> "Survivors":
        """The same process of the same group, at another store, which this group has not met at before."""
        other = Survivors(store, self._process)
        with self._lock:
            other._members, self._members = self._members, ()
        other._has_met = True
        Fate.ENTERED.tell(store, self._process)
        return other

    def enter(self, members: Sequence[str]) -> None:
        """These processes are about to form a group, or are in one."""
        with self._lock:
            if not self._members:
                # The others may have gone on several times before this one came.
                self._round = undecided(self._store)
                Fate.ENTERED.tell(self._store, self._process)
            self._members = tuple(members)
            self._has_met = True
            self._news = -1  # what came before may be of one of these

    def expect(self, joining: Iterable[str]) -> None:
        """These processes are about to join those of the group."""
        with self._lock:
            self._members = (*self._members, *joining)
            self._news = -1

    def look(self, store: Any) -> None:
        """End this process's connections where a member is gone or noticed a loss; on ``store``'s thread."""
        news = store.add(_NEWS, 0)
        if news == self._news:
            return
        with self._lock:
            # Until the main thread has noticed: it may open more of them.
            if self._is_lost(store):
                CONNECTIONS.shut()
                self.noticed = True
            else:
                self._news = news

    def notice(self, silent: str | None) -> bool:
        """End this process's connections where another one does not answer; on another thread.

        ``silent``: that process; None: it is the store. Returns False where this process was in no group yet,
        and so cannot go on.
        """
        if silent is None:
            self.store_lost = True
            self._connection.shut()
        with self._lock:
            if self._members and (silent is None or (silent in self._members and not self.agreeing)):
                CONNECTIONS.shut()
                self.noticed = True
            return self._has_met

    def _is_lost(self, store: Any) -> bool:
        keys = [self._key("begun"), _NONE_GOES_ON, *map(Fate.GONE.key, self._members)]
        return bool(self._members) and any(store.check([key]) for key in keys)

    def leave(self) -> None:
        """This process ends well."""
        with contextlib.suppress(RuntimeError, ConnectionError):  # the store may have ended before
            Fate.LEFT.tell(self._store, self._process)

    def none_goes_on(self, reason: str) -> None:
        """This process ends by an error of its own."""
        tell_none_goes_on(self._store, reason)

    def agree(
        self,
        told: str,
        decide: Callable[[Mapping[str, str]], str],
        left_out: Callable[[], Collection[str]] = tuple,
    ) -> str:
        """Agreement of those of the group that are left on how to go on; each of them calls this.

        Args:
            told: what whoever decides has to know of this process.
            decide: gets by process that is left, in the order of the group, what it told.
            left_out: those that nobody waits for, beside the ones that have told that they are gone.

        Raises:
            PeerLost: none goes on.
        """
        return self._agree(told, lambda: self._decided(decide, left_out))

    def come_back(self, told: str, members: Sequence[str]) -> str:
        """Agreement of the others to go on with this process, restarted under its name after a kill.

        ``members``: the processes of the newest plan; all of them may have been killed.

        Raises:
            PeerLost: none goes on, or none is left that could decide.
        """
        self._round = undecided(self._store)
        self._store.set(self._key(f"new/{self._process}"), "")
        return self._agree(told, lambda: self._check_that_one_decides(members))

    def _agree(self, told: str, decided: Callable[[], str | None]) -> str:
        self.agreeing = True
        store, key = self._store, self._key("decision")
        store.set(self._key(f"here/{self._process}"), told)
        store.set(self._key("begun"), "")
        store.add(_NEWS, 1)
        decision: str | None = None
        while decision is None:
            if store.check([key]):
                decision = str(store.get(key).decode())
            elif store.check([_NONE_GOES_ON]):
                raise PeerLost(store.get(_NONE_GOES_ON).decode())
            else:
                decision = decided()
            if decision is None:
                time.sleep(_POLL_SECONDS)
        with self._lock:
            self._members, self.noticed = (), False
        return decision

    def _decided(
        self, decide: Callable[[Mapping[str, str]], str], left_out: Callable[[], Collection[str]]
    ) -> str | None:
        """The decision, once all are here, where it is this process that decides."""
        store = self._store
        left = [p for p in self._members if not any(f.is_of(store, p) for f in (Fate.GONE, Fate.LEFT))]
        here = [process for process in left if store.check([self._key(f"here/{process}")])]
        old = [process for process in here if not store.check([self._key(f"new/{process}")])]
        all_here = here == left or set(left) <= {*here, *left_out()}
        if old[:1] == [self._process] and all_here:
            told = {process: store.get(self._key(f"here/{process}")).decode() for process in here}
            return str(store.compare_set(self._key("decision"), "", decide(told)).decode())
        return None

    def _check_that_one_decides(self, members: Sequence[str]) -> None:
        store = self._store
        ended = [process for process in members if Fate.LEFT.is_of(store, process)]
        if ended:
            raise PeerLost(f"{ended[0]} has ended while this rank was started again")
        if all(store.check([self._key(f"new/{process}")]) for process in members):
            raise PeerLost("all ranks were killed, and no copy is left in memory")

    def _key(self, name: str) -> str:
        return f"survivors/{self._round}/{name}"
