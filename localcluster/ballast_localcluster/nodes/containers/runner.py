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
    State,
    exit_code,
    now,
    terminated,
    waiting,
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
        first = waiting("PodInitializing" if waits_for_init else "ContainerCreating")
        self.view = ContainerView(name=self.name, image=container.get("image", ""), state=first)
        self.previous_run: int | None = None
        self._process: ContainerProcess | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id of the first process; None while none runs."""
        return self._process.pid if self._process and "running" in self.view.state else None

    def resume(self, previous: Manifest) -> None:
        """Take over a gone agent's processes; ``previous``: the container's status that it wrote last."""
        self.view.restarts = previous.get("restartCount", 0)
        state = previous.get("state", {})
        if "terminated" in state:
            self.view.state = state
        elif "running" in state:
            self.view.state = terminated(
                137,
                "NodeLost",
                "the node went down with the process",
                since=state["running"].get("startedAt"),
                container=previous.get("containerID", ""),
            )

    async def run(self, policy: str) -> int:
        """Run it under a restart policy until it is done or stopped; its exit code."""
        backoff, run, view = Backoff(), self.view.restarts, self.view
        if (before := exit_code(view.state)) is not None:  # resumed
            if not restarts(policy, before):
                await self._changed()
                return before
            self._keep_as_last(view.state)
            view.will_restart, run = True, run + 1
        while True:
            began = time.monotonic()
            ended = await self._run_once(run)
            code: int = ended["terminated"]["exitCode"]
            if self._stopping.is_set() or not restarts(policy, code):
                view.state, view.will_restart = ended, False
                await self._changed()
                return code
            view.state, view.will_restart = ended, True
            wait = backoff.seconds(time.monotonic() - began)
            if wait:
                self._keep_as_last(ended)
                message = f"back-off {wait:g}s restarting failed container={self.name}"
                view.state = waiting("CrashLoopBackOff", message)
                self._report("Warning", "BackOff", f"Back-off restarting failed container {self.name}")
            await self._changed()
            if await self._stopped_within(wait):
                view.state, view.will_restart = ended, False
                return code
            self._keep_as_last(ended)
            run += 1

    def _keep_as_last(self, ended: State) -> None:
        """The run that ended becomes ``lastState``; the next one counts from the start of its process."""
        self.view.last_state, self.previous_run = ended, self.view.restarts

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

    async def _run_once(self, run: int) -> State:
        since = now()
        command = await self._command(run)
        if command is None:
            return terminated(137, "Error", "stopped before it started", since=None)
        try:
            self._termination_file.write_bytes(b"")  # a kubelet's is there and empty
            self._process = await ContainerProcess.start(command)
        except ProcessStartError as error:
            self.view.restarts = run
            self._report("Warning", "Failed", f"Error: {error}")
            return terminated(START_ERROR_EXIT_CODE, "StartError", str(error), since=since)
        view, pid = self.view, self._process.pid
        view.state, view.will_restart, view.restarts = {"running": {"startedAt": since}}, False, run
        view.container_id = f"process://{pid}"
        self._report("Normal", "Started", f"Started container {self.name} as process {pid}")
        if self._stopping.is_set():  # it was asked to end while it was starting
            self._process.terminate()
        waits = asyncio.ensure_future(self._process.wait())
        try:
            await self._changed()
            code = await asyncio.shield(waits)
        except asyncio.CancelledError:
            self._process.kill()
            raise
        message = termination_message(
            self._termination_file,
            command.log,
            policy=self._container.get("terminationMessagePolicy", "File"),
            exit_code=code,
        )
        reason = "Completed" if code == 0 else "Error"
        return terminated(code, reason, message, since=since, container=view.container_id)

    async def _command(self, run: int) -> Command | None:
        """The command of this run, as soon as all it refers to exists; None once it is to stop."""
        while not self._stopping.is_set():
            try:
                return await self._prepare(run)
            except ConfigurationError as error:
                problem = waiting("CreateContainerConfigError", str(error))
                if problem != self.view.state:
                    self.view.state = problem
                    self._report("Warning", "Failed", f"Error: {error}")
                    await self._changed()
            await self._stopped_within(_CONFIGURATION_RETRY_SECONDS)
        return None

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()
