"""Heartbeats between ranks: detection of hung ranks in seconds, before gloo's time-out.

Every rank's heartbeat thread increments its own key in the store and watches those of the
others.  A dead rank closes its connections and is seen at once by its neighbours; a rank that is
stopped, or whose machine is gone without closing them, is detected here.  The main thread may be waiting for
that rank inside torch and cannot be interrupted there, so the watcher ends the process.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""How often a rank counts up."""


class RankHeartbeat:
    """Beats for this process and watches the others until it is closed."""

    def __init__(
        self,
        store: Any,
        *,
        process: str,
        hang_seconds: float,
        lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start beating.

        Args:
            store: where ranks meet; a separate connection is opened.
            process: name of this one.
            hang_seconds: a rank whose counter has not grown for this long is hung.
            lost: called once, on the heartbeat's thread, with the reason as text.
            clock: seconds.
        """
        self._store = store.clone()
        self._process = process
        self._hang_seconds = hang_seconds
        self._lost = lost
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._closed = threading.Event()
        self._answered = clock()
        for name, work in (("heartbeat", self._run), ("heartbeat-store", self._watch_store)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def watch(self, processes: Iterable[str]) -> None:
        """Watch these processes from now on, and no others."""
        now = self._clock()
        with self._lock:
            self._seen = {name: (b"", now) for name in processes if name != self._process}

    def close(self) -> None:
        """Stop the heartbeat, and stop watching the others."""
        self._closed.set()

    def _run(self) -> None:
        beats = 0
        while not self._closed.wait(BEAT_SECONDS):
            beats += 1
            try:
                self._store.set(_key(self._process), str(beats))
                hung = self._hung()
            except (dist.DistError, RuntimeError) as error:
                # The store ends with rank 0; this rank may be ending too.
                hung = f"rank 0's store is gone: {error}"
            self._answered = self._clock()
            if hung and not self._closed.wait(BEAT_SECONDS):
                self._lost(hung)
                return

    def _watch_store(self) -> None:
        # The store hangs with rank 0, and a call to it then never returns.
        while not self._closed.wait(BEAT_SECONDS):
            silent = self._clock() - self._answered
            if silent > self._hang_seconds:
                self._lost(f"rank 0's store has not answered for {silent:.0f} s")
                return

    def _hung(self) -> str | None:
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
                elif now - since > self._hang_seconds:
                    return f"{name} has not been heard of for {now - since:.0f} s"
        return None


def _key(process: str) -> str:
    return f"heartbeat/{process}"
