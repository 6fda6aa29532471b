"""Heartbeats between ranks: detection of hung ranks in seconds, before gloo's time-out.

Every rank's heartbeat thread increments its own key in the store and watches those of the
others.  A dead rank closes its connections and is seen at once by its neighbours; a rank that is
stopped, or whose machine is gone without closing them, is detected here.  The main thread may be waiting for
that rank inside torch and cannot be interrupted there, so the watcher ends the process, or, where the gang
goes on in place, its connections.

With its count a rank tells what it is busy with, and for how long: ranks that have waited too long name it.
A group's waits end by the longest of the job's limits, by an error on gloo; where the work has a shorter one,
or torch would end the process as on NCCL, those that wait for it end here.  Ranks then leave their stacks, as
where one hangs, and on NCCL what its flight recorder has of the last collectives.
"""

import contextlib
import dataclasses
import faulthandler
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ballast_trainer.distributed.activity import ACTIVITY, Limit
from ballast_trainer.distributed.survivors import Fate, Survivors
from ballast_trainer.errors import PeerLost, WaitedTooLong

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Seconds between a rank's counts."""

_TELLS_AFTER = 0.25
"""Part of the time that others wait: a rank that is busy for longer says so."""

_STACKS = "heartbeat-stacks"
_STANDARD_ERROR = 2

_RECORDED = "2000"
"""Collectives that NCCL's flight recorder keeps."""

_FOLDER_ENV = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_FOLDER = "/tmp/nccl_trace_rank_"
"""Torch's own default, where its tools look."""


def record_collectives() -> None:
    """Have NCCL keep its last collectives, and write them where one times out; before the first group."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", _RECORDED)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


@dataclasses.dataclass(frozen=True, slots=True)
class HangLimits:
    """Limits on how long ranks wait for each other.

    Attributes:
        hang_seconds: a rank whose counter has not grown for this long is hung.
        busy_seconds: for one that is busy, by the limit of its work; where it has none, that of any.
        kills: whether a process that hangs is killed for those that wait, in place of telling them.
        torch_raises: whether a wait inside torch ends by an error after the longest of ``busy_seconds``.
    """

    hang_seconds: float
    busy_seconds: Mapping[Limit, float]
    kills: bool = True
    torch_raises: bool = True

    @property
    def longest(self) -> Limit:
        """Limit of waits inside torch, which do not know for what they wait."""
        return max(self.busy_seconds, key=self.busy_seconds.__getitem__)

    def known(self, limit: Limit) -> Limit:
        """The limit, or that of any work where it has none of its own."""
        return limit if limit in self.busy_seconds else Limit.ANY

    def overdue(self, busy: Iterable["_Busy"]) -> list["_Busy"]:
        """The works that take longer than their limit, where torch would wait on."""
        limits = self.busy_seconds
        ends_here = {of for of in limits if not self.torch_raises or limits[of] < limits[self.longest]}
        return [one for one in busy if one.limit in ends_here and one.seconds > limits[one.limit]]

    def exceeded(self, busy: Sequence["_Busy"]) -> str:
        """Message where these were waited for too long: who is busy, and the field that sets the limit."""
        who = ", ".join(one.said for one in busy)
        limits = dict.fromkeys(one.limit for one in busy) or (self.longest,)
        fields = " and ".join(f"{limit} ({self.busy_seconds[limit]:g})" for limit in limits)
        return (
            f"{who or 'ranks that live did not answer, and their stacks tell where they are'}; "
            f"the others wait no longer than {fields}. To fix: raise it, or let that work take less time"
        )


class _Busy(NamedTuple):
    """A rank's work, as its heartbeat tells it."""

    process: str
    limit: Limit
    seconds: float
    words: str

    @property
    def said(self) -> str:
        return f"{self.process} is busy with {self.words} for {self.seconds:.0f} s"


class RankHeartbeat:
    """Beats for this process and watches the others until it is closed."""

    def __init__(
        self,
        store: Any,
        *,
        process: str,
        limits: HangLimits,
        lost: Callable[[str], None],
        survivors: Survivors | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start beating.

        Args:
            store: where ranks meet; a separate connection is opened. None: this rank is alone, and tells its
                user what it is busy with for long.
            process: name of this one.
            limits: after which a rank is told of, or killed.
            lost: called once, on the heartbeat's thread, with the reason as text.
            survivors: with which this rank goes on where one is lost; None: it does not.
            clock: seconds.
        """
        self._store = dist.HashStore() if store is None else store.clone()
        self._limits, self._survivors = limits, survivors
        self._process = process
        self._lost = lost
        self._doing: tuple[object, ...] | None = None
        self._doing_since = clock()
        self._told = self._shown = self._idle = False
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._closed = threading.Event()
        self._answered = clock()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()
        if store is not None:
            threading.Thread(target=self._watch_store, name="heartbeat-store", daemon=True).start()

    def at(self, store: Any, survivors: Survivors) -> "RankHeartbeat":
        """The same at another store, in place of this one; nobody else is watched yet."""
        self.close()
        return RankHeartbeat(
            store,
            process=self._process,
            limits=self._limits,
            lost=self._lost,
            survivors=survivors,
            clock=self._clock,
        )

    def watch(self, processes: Iterable[str], joining: Iterable[str] = ()) -> None:
        """Watch these processes from now on, and no others; ``joining`` ones are about to come."""
        now, processes = self._clock(), tuple(processes)
        if self._survivors is not None and processes:
            self._survivors.enter(processes)
        elif self._survivors is not None:
            self._survivors.expect(joining)
        with self._lock:
            self._seen = {name: (b"", now) for name in processes if name != self._process}
        if self._survivors is not None and processes:
            self._survivors.agreeing = False

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say which ranks were busy where this one has waited too long; all print their stacks.

        Raises:
            WaitedTooLong: with that text.
        """
        try:
            yield
        except PeerLost as error:
            if not re.search("timed out|timeout", str(error), re.IGNORECASE):
                raise
            said = self._limits.exceeded(self._busy())
            self._show_all_stacks()
            raise WaitedTooLong(said) from error

    def close(self) -> None:
        """Stop the heartbeat, and stop watching the others."""
        self._closed.set()

    def _run(self) -> None:
        beats = 0
        while not self._closed.wait(BEAT_SECONDS):
            beats += 1
            gone = ""
            silent: str | None = None
            try:
                self._store.set(_key(self._process), f"{beats} {self._own_work()}".strip())
                silent = self._silent()
                if self._ends_overdue():
                    return
                if self._store.check([_STACKS]):
                    self._show_stacks()
                if self._survivors is not None:
                    self._survivors.look(self._store)
            except (dist.DistError, RuntimeError) as error:
                # The store ends with rank 0's pod; this rank may be ending too.
                gone, silent = f"rank 0's store is gone: {error}", None
            self._answered = self._clock()
            if silent is not None:
                gone = f"{silent} has not been heard of for {self._limits.hang_seconds:.0f} s"
            if gone and not self._closed.wait(BEAT_SECONDS) and self._ends(gone, silent):
                return

    def _own_work(self) -> str:
        """Limit, seconds and words of this rank's work, as text; tells the user where it takes long."""
        doing, now = ACTIVITY.now, self._clock()
        if doing is not self._doing:
            self._doing, self._doing_since, self._told = doing, now, False
        if doing is None:
            return ""
        limit, *words = doing
        limit = self._limits.known(limit)
        own = _Busy(self._process, limit, now - self._doing_since, " ".join(map(str, words)))
        most = self._limits.busy_seconds[limit]
        if not self._told and own.seconds > _TELLS_AFTER * most:
            self._told = True
            others = "; the others may wait for it" if self._seen else ""
            logger.warning("%s%s (%s: %g)", own.said, others, limit, most)
        if own.seconds > most:
            self._show_stacks()
        return f"{limit} {own.seconds:.1f} {own.words}"

    def _busy(self) -> list[_Busy]:
        """The other ranks' work."""
        with self._lock:
            told = {name: beat.decode().split(" ", 3)[1:] for name, (beat, _) in self._seen.items()}
        busy = []
        for name, work in told.items():
            with contextlib.suppress(ValueError):  # idle, or of another release
                limit, seconds, words = work
                busy.append(_Busy(name, self._limits.known(Limit(limit)), float(seconds), words))
        return busy

    def _ends_overdue(self) -> bool:
        """End the process where it has nothing to do, and others take longer than it waits for them."""
        before, self._idle = self._idle, ACTIVITY.now is None and not ACTIVITY.patient
        late = self._limits.overdue(self._busy()) if before and self._idle else ()
        if not late:
            return False
        said = self._limits.exceeded(late)
        self._show_all_stacks()
        if self._survivors is not None:
            self._survivors.none_goes_on(said)
        self._lost(said)
        return True

    def _show_all_stacks(self) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.set(_STACKS, "")
        self._show_stacks()
        # The store may be this rank's, and the others read it once a beat.
        self._closed.wait(2 * BEAT_SECONDS)

    def _show_stacks(self) -> None:
        if not self._shown:
            self._shown = True
            faulthandler.dump_traceback(_STANDARD_ERROR)
            with contextlib.suppress(Exception):  # the process is ending, and says why by itself
                self._dump_collectives()

    def _dump_collectives(self) -> None:
        if dist.is_initialized() and dist.get_backend() == "nccl":
            path = Path(f"{os.environ.get(_FOLDER_ENV, _FOLDER)}{dist.get_rank()}")
            path.write_bytes(torch._C._distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]
            logger.error("NCCL's last collectives are in %s (read them with torchfrtrace)", path)

    def _watch_store(self) -> None:
        # The store hangs with rank 0, and a call to it then never returns.
        while not self._closed.wait(BEAT_SECONDS):
            silent = self._clock() - self._answered
            if silent > self._limits.hang_seconds:
                said = f"rank 0's store has not answered for {silent:.0f} s"
                if self._ends(said, None):
                    return

    def _ends(self, said: str, silent: str | None) -> bool:
        """End the process because of a loss; False: it goes on in place, by the operator's plan."""
        if self._survivors is not None and not self._limits.kills:
            if not self._survivors.noticed:
                logger.warning("%s", said)
            if self._survivors.notice(silent):
                return False
        self._show_stacks()
        self._lost(said)
        return True

    def _silent(self) -> str | None:
        """Another process that is not heard of any more."""
        with self._lock:
            names = list(self._seen)
        for name in names:
            beat = self._store.get(_key(name)) if self._store.check([_key(name)]) else b""
            now = self._clock()
            with self._lock:
                if name not in self._seen:
                    continue
                last, since = self._seen[name]
                if beat != last:
                    self._seen[name] = (beat, now)
                elif now - since > self._limits.hang_seconds:
                    if self._survivors is not None and self._survivors.agreeing and not self._limits.kills:
                        # It may be starting again.
                        continue
                    if self._survivors is None or not self._limits.kills:
                        return name
                    del self._seen[name]
                    said = f"{name} has not been heard of for {now - since:.0f} s"
                    logger.error("%s: it is to be killed, and the others go on", said)
                    Fate.HUNG.tell(self._store, name)
        return None


def _key(process: str) -> str:
    return f"heartbeat/{process}"
