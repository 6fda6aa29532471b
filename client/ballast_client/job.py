"""The job that a script is part of: progress out, the order to save and stop in."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ballast_client import messages
from ballast_client.agreement import Follower, LastStep, Leader
from ballast_client.channels import Channel, find_channel
from ballast_client.checkpoints import Checkpoints
from ballast_client.reporter import Reporter

logger = logging.getLogger("ballast_client")

SAVE_SECONDS = 60.0
"""Time to save where the environment does not say it."""


class Job:
    """Make one in every rank, after the launcher has set RANK and WORLD_SIZE and before the loop.

    Away from Ballast it does nothing: the script runs as it is.

    Args:
        channel: to the operator; None: as the environment says.
        environment: of the process; None: the process's own.
        hang_seconds: after this long without a step the job counts as hung and is restarted; None: never.
    """

    def __init__(
        self,
        *,
        channel: Channel | None = None,
        environment: Mapping[str, str] | None = None,
        hang_seconds: float | None = None,
    ) -> None:
        env = os.environ if environment is None else environment
        self.rank, self.ranks = int(env.get("RANK") or 0), int(env.get("WORLD_SIZE") or 1)
        self._env = env
        self._channel = find_channel(env) if channel is None else channel
        self._last = LastStep()
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._leaving = False
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._reporter: Reporter | None = None
        if self._channel is None:
            return
        port = int(env.get("BALLAST_CLIENT_PORT") or int(env.get("MASTER_PORT") or 29400) + 1)
        address, token = env.get("MASTER_ADDR") or "127.0.0.1", env.get("BALLAST_JOB_UID") or "-"
        if self.rank == 0:
            try:
                self._leader = Leader(
                    self._last,
                    address=address,
                    port=port,
                    ranks=self.ranks,
                    token=token,
                    asked=self._told_to_end,
                )
            except OSError as error:
                raise RuntimeError(
                    f"rank 0 cannot listen on {address} port {port} for the other ranks: {error}. "
                    "To fix: set BALLAST_CLIENT_PORT to a free port, in every rank"
                ) from error
            self._reporter = Reporter(
                self._channel,
                pod=env.get("BALLAST_POD_NAME", ""),
                stop=self._agree,
                hang_seconds=hang_seconds,
                renew_seconds=float(env.get("BALLAST_RENEW_SECONDS") or 0) or None,
            )
        else:
            self._follower = Follower(self._last, address=address, port=port, rank=self.rank, token=token)
        if threading.current_thread() is threading.main_thread():
            self._handle_sigterm()

    @property
    def total_steps(self) -> int | None:
        """``spec.totalSteps``; None away from Ballast."""
        text = self._env.get("BALLAST_TOTAL_STEPS")
        return int(text) if text else None

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints in ``spec.checkpoint.path``; away from Ballast in the folder ``checkpoints``."""
        folder = self._env.get("BALLAST_CHECKPOINT_PATH") or "checkpoints"
        return Checkpoints(folder, keep=int(self._env.get("BALLAST_CHECKPOINT_KEEP") or 2))

    @property
    def leaving(self) -> bool:
        """This step was the last one: save, and :meth:`leave`."""
        return self._leaving

    @property
    def seconds_left(self) -> float | None:
        """Time left to save, once the job has been asked to; None: it has not."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def steps(
        self,
        total: int | None = None,
        *,
        load: Callable[[Path], object] | None = None,
        save: Callable[[Path], object] | None = None,
        every: int | None = None,
    ) -> Iterator[int]:
        """The steps that are left, from the newest checkpoint on; each is done when the next is asked for.

        Args:
            total: steps of the job; None: ``spec.totalSteps``.
            load: reads the checkpoint at a path; every rank calls it.
            save: writes one (a file or a folder) at a path; rank 0 calls it.
            every: steps between two checkpoints; None: ``spec.checkpoint.everySteps``.

        Raises:
            SystemExit: with 75, after saving, where the job was asked to save and stop.
            ValueError: no total is known, or ``every`` is below 1.
        """
        total = self.total_steps if total is None else total
        if total is None:
            raise ValueError("steps needs a total away from Ballast. To fix: job.steps(10_000, ...)")
        every = int(self._env.get("BALLAST_CHECKPOINT_EVERY_STEPS") or 100) if every is None else every
        if every < 1:
            raise ValueError(f"every={every}: checkpoints are at least 1 step apart. To fix: leave it out")
        checkpoints = self.checkpoints
        first = 0
        newest = checkpoints.newest() if load is not None else None
        if newest is not None and load is not None:
            first = newest[0]
            load(newest[1])
        self.resumed(first)
        for step in range(first, total):
            yield step
            done = step + 1
            last = self.step(done)
            if save is not None and self.rank == 0 and (last or done % every == 0 or done == total):
                checkpoints.save(done, save)
                self.saved(done)
            if last and done < total:
                self.leave(done)
        self.finish(total)

    def resumed(self, step: int) -> None:
        """The loop begins after this many steps, which a checkpoint holds."""
        self._last.start(step)
        if self._reporter is not None:
            self._reporter.resumed(step)

    def step(self, step: int, *, loss: float | None = None) -> bool:
        """``step`` optimizer steps are done, over all launches. True, in every rank: save now, and leave."""
        if loss is not None:
            self.report(loss=loss)
        if self._reporter is not None:
            self._reporter.step(step)
        self._leaving = self._channel is not None and self._last.reached(step)
        return self._leaving

    def report(self, *, loss: float) -> None:
        """The training loss, for the job's status; a number, not a tensor on a GPU."""
        if self._reporter is not None:
            self._reporter.loss = float(loss)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is complete."""
        if self._reporter is not None:
            self._reporter.saved(step)

    def leave(self, step: int) -> NoReturn:
        """Exit with the code that says: saved, to be continued. Raises SystemExit: always."""
        if self._reporter is not None:
            self._reporter.close(left_at=step)
        self.close()
        log = self._env.get("BALLAST_TERMINATION_LOG")
        if log and self._channel is not None:
            try:
                Path(log).write_text(messages.termination(message=f"stopped after step {step}", step=step))
            except OSError as error:
                logger.warning("no termination message: %s", error)
        raise SystemExit(messages.STOPPED_EXIT_CODE)

    def finish(self, step: int) -> None:
        """All steps are done and saved. What the script still does after that has no heartbeat.

        Waits up to two minutes for the API server to take it: a job that does not say it is launched again.
        """
        self._leaving = False
        if self._reporter is not None:
            self._reporter.close(finished=step)
        self.close()

    def close(self) -> None:
        """Stop listening; :meth:`finish` and :meth:`leave` do it."""
        with self._lock:
            self._closed = True
        if self._reporter is not None:
            self._reporter.close()
        if self._leader is not None:
            self._leader.close()
        if self._follower is not None:
            self._follower.close()

    def __enter__(self) -> "Job":
        """The job itself."""
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A script that leaves its loop because it was told to exits as one that was stopped."""
        self.close()
        if kind is None and self._leaving:
            raise SystemExit(messages.STOPPED_EXIT_CODE)

    def _handle_sigterm(self) -> None:
        before = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: Any) -> None:
            if self._closed:
                signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)
                return
            # Not in the handler: the main thread may hold a lock that is needed for it.
            threading.Thread(target=self._told_to_end, args=("SIGTERM",), daemon=True).start()

        signal.signal(signal.SIGTERM, handle)

    def _told_to_end(self, why: str) -> None:
        seconds = float(self._env.get("BALLAST_STOP_SECONDS") or SAVE_SECONDS)
        self._set_deadline(seconds)
        if self._follower is not None:
            self._follower.ask()
        if self._reporter is not None:
            self._reporter.stop_now(why)

    def _agree(self, why: str) -> bool:
        """Rank 0: find the last step with all ranks; False: try again later."""
        self._set_deadline(float(self._env.get("BALLAST_SAVE_SECONDS") or SAVE_SECONDS))
        logger.warning("asked to save and stop: %s", why)
        return self._leader is not None and self._leader.agree()

    def _set_deadline(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._deadline = until if self._deadline is None else min(self._deadline, until)
