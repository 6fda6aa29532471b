"""One container of a pod: start it, watch it, start it again as the restart policy says."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ballast_localcluster.nodes.api import Manifest
from ballast_localcluster.nodes.containers.process import (
    Command,
    ContainerProcess,
    ProcessStartError,
    termination_message,
)
from ballast_localcluster.nodes.containers.states import (
    ContainerView,
    Running,
    State,
    Terminated,
    Waiting,
    now,
)
from ballast_localcluster.nodes.pod_resources.references import ConfigurationError

FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 30.0
CALM_SECONDS = 60.0
"""kubelet waits 10 s to 5 min and forgets after 10 min; here all three are ten times shorter."""


def restarts(policy: str, exit_code: int) -> bool:
    """True if ``restartPolicy`` restarts a process that ended with ``exit_code``."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


@dataclasses.dataclass(slots=True)
class Backoff:
    """Waiting times that double from the first to the last, and start over after a calm run."""

    _next: float = 0.0

    def seconds(self, ran_seconds: float) -> float:
        """Seconds to wait after a run of ``ran_seconds``; the first restart does not wait."""
        if ran_seconds >= CALM_SECONDS:
            self._next = 0.0
        wait = self._next
        self._next = min(max(FIRST_BACKOFF_SECONDS, 2 * wait), LAST_BACKOFF_SECONDS)
        return wait


START_ERROR_EXIT_CODE = 128
_CONFIGURATION_RETRY_SECONDS = 1.0

Prepare = Callable[[int], Awaitable[Command]]
Report = Callable[[str, str, str], None]


class ContainerRunner:
    """Runs one container.

    Args:
        container: its spec.
        termination_file: where the process leaves its message.
        prepare: builds the command for the run of that number (0: the first); raises ConfigurationError.
        changed: is awaited after each change of state.
        report: takes an event (type, reason, message).
        waits_for_init: the pod has init containers that run before this one.
    """

    def __init__(
        self,
        container: Manifest,
        *,
        termination_file: Path,
        prepare: Prepare,
        changed: Callable[[], Awaitable[None]],
        report: Report,
        waits_for_init: bool = False,
    ) -> None:
        self.name: str = container["name"]
        self._container = container
        self._termination_file = termination_file
        self._prepare = prepare
        self._changed = changed
        self._report = report
        self._state: State = Waiting(reason="PodInitializing" if waits_for_init else "ContainerCreating")
        self._last_state: Terminated | None = None
        self._last_run: int | None = None
        self._will_restart = False
        self._process: ContainerProcess | None = None
        self._stopping = asyncio.Event()
        self.restarts = 0
        self.container_id = ""

    @property
    def view(self) -> ContainerView:
        """The container as it is now."""
        return ContainerView(
            name=self.name,
            image=self._container.get("image", ""),
            state=self._state,
            last_state=self._last_state,
            restarts=self.restarts,
            container_id=self.container_id,
            will_restart=self._will_restart,
        )

    @property
    def pid(self) -> int | None:
        """Process id of the first process; None while none runs."""
        return self._process.pid if self._process and isinstance(self._state, Running) else None

    @property
    def previous_run(self) -> int | None:
        """Number of the run that ``lastState`` describes; None before the first restart."""
        return self._last_run

    def resume(self, previous: Manifest) -> None:
        """Take over a gone agent's processes; ``previous``: the container's status that it wrote last."""
        self.restarts = previous.get("restartCount", 0)
        state = previous.get("state", {})
        if ended := state.get("terminated"):
            self._state = Terminated(
                exit_code=ended["exitCode"],
                reason=ended.get("reason", ""),
                message=ended.get("message", ""),
                started_at=ended.get("startedAt", ""),
                finished_at=ended.get("finishedAt", ""),
                container_id=ended.get("containerID", ""),
            )
        elif running := state.get("running"):
            self._state = Terminated(
                exit_code=137,
                reason="NodeLost",
                message="the node went down with the process",
                started_at=running.get("startedAt", ""),
                finished_at=now(),
                container_id=previous.get("containerID", ""),
            )

    async def run(self, policy: str) -> Terminated:
        """Run it under a restart policy until it is done or stopped; how it ended."""
        backoff, run = Backoff(), self.restarts
        if isinstance(self._state, Terminated):  # resumed
            if not restarts(policy, self._state.exit_code):
                await self._changed()
                return self._state
            self._keep_as_last(self._state)
            self._will_restart, run = True, run + 1
        while True:
            began = time.monotonic()
            ended = await self._run_once(run)
            if self._stopping.is_set() or not restarts(policy, ended.exit_code):
                self._state, self._will_restart = ended, False
                await self._changed()
                return ended
            self._state, self._will_restart = ended, True
            wait = backoff.seconds(time.monotonic() - began)
            if wait:
                self._keep_as_last(ended)
                self._state = Waiting(
                    reason="CrashLoopBackOff",
                    message=f"back-off {wait:g}s restarting failed container={self.name}",
                )
                self._report("Warning", "BackOff", f"Back-off restarting failed container {self.name}")
            await self._changed()
            if await self._stopped_within(wait):
                self._state, self._will_restart = ended, False
                return ended
            self._keep_as_last(ended)
            run += 1

    def _keep_as_last(self, ended: Terminated) -> None:
        """The run that ended becomes ``lastState``; the next one counts from the start of its process."""
        self._last_state, self._last_run = ended, self.restarts

    def terminate(self) -> None:
        """Ask it to end (SIGTERM), and start it no more."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it (SIGKILL), and start it no more."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()

    async def _run_once(self, run: int) -> Terminated:
        started_at = now()
        command = await self._command(run)
        if command is None:
            return Terminated(exit_code=137, reason="Error", message="stopped before it started")
        try:
            self._termination_file.write_bytes(b"")  # a kubelet's is there and empty
            self._process = await ContainerProcess.start(command)
        except ProcessStartError as error:
            self.restarts = run
            self._report("Warning", "Failed", f"Error: {error}")
            return Terminated(
                exit_code=START_ERROR_EXIT_CODE,
                reason="StartError",
                message=str(error),
                started_at=started_at,
                finished_at=now(),
            )
        self.container_id = f"process://{self._process.pid}"
        self._state, self._will_restart, self.restarts = Running(started_at=started_at), False, run
        self._report("Normal", "Started", f"Started container {self.name} as process {self._process.pid}")
        if self._stopping.is_set():  # it was asked to end while it was starting
            self._process.terminate()
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            await self._changed()
            code = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._process.kill()
            raise
        message = termination_message(
            self._termination_file,
            command.log,
            policy=self._container.get("terminationMessagePolicy", "File"),
            exit_code=code,
        )
        return Terminated(
            exit_code=code,
            reason="Completed" if code == 0 else "Error",
            message=message,
            started_at=started_at,
            finished_at=now(),
            container_id=self.container_id,
        )

    async def _command(self, run: int) -> Command | None:
        """The command of this run, as soon as all it refers to exists; None once it is to stop."""
        while not self._stopping.is_set():
            try:
                return await self._prepare(run)
            except ConfigurationError as error:
                problem = Waiting(reason="CreateContainerConfigError", message=str(error))
                if problem != self._state:
                    self._state = problem
                    self._report("Warning", "Failed", f"Error: {error}")
                    await self._changed()
            await self._stopped_within(_CONFIGURATION_RETRY_SECONDS)
        return None

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()
