"""Solve allocations in a process of their own, with a hard time limit and a fallback.

An LP of a large cluster takes seconds of pure CPU; on the event loop it would stop heartbeats. The
process lives as long as it answers in time; one that does not is killed, and the next solve starts
another. Whatever happens, the caller gets an allocation and the name of the way it came about.
"""

import asyncio
import contextlib
import dataclasses
import enum
import logging
import pickle
import sys
import time
from collections.abc import Mapping
from typing import Any

from ballast_policies.allocation.greedy import greedy
from ballast_policies.allocation.problem import Allocation, Problem

from ballast_operator.allocator.solver_process import HEADER, encode
from ballast_operator.settings import SolverSettings

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "ballast_operator.allocator.solver_process")


class SolveOutcome(enum.StrEnum):
    """How an allocation came about; the reason of the ClusterPolicy's condition ``Solved``."""

    SOLVED = "Solved"
    """By the policy's solver, within its time."""
    TIME_LIMIT = "SolverTimeLimit"
    """By the greedy fallback: the solver took too long and was killed."""
    FAILED = "SolverFailed"
    """By the greedy fallback: the solver refused the problem or its process died."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solve:
    """An allocation, and how it came about."""

    allocation: Allocation
    outcome: SolveOutcome
    message: str
    seconds: float


class _ProcessDied(Exception):  # noqa: N818
    pass


class Solver:
    """A solver process, restarted as needed. Use as an async context manager."""

    def __init__(self, settings: SolverSettings, *, command: tuple[str, ...] = COMMAND) -> None:
        self._settings = settings
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "Solver":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def solve(self, policy: str, problem: Problem, options: Mapping[str, Any] | None = None) -> Solve:
        """The policy's allocation of ``problem``, or the greedy one where the solver fails or is late."""
        async with self._lock:
            started = time.monotonic()
            try:
                answer = await self._ask((policy, problem, dict(options or {})))
            except TimeoutError:
                await self.kill()
                return self._fall_back(
                    problem,
                    started,
                    SolveOutcome.TIME_LIMIT,
                    f"the solver was killed after {time.monotonic() - started:.1f} s with {len(problem.jobs)} jobs "
                    f"(limit {self._settings.limit_seconds:g} s); greedy allocation used",
                )
            except (_ProcessDied, OSError) as error:
                await self.kill()
                return self._fall_back(
                    problem,
                    started,
                    SolveOutcome.FAILED,
                    f"the solver's process died ({error}); greedy allocation used",
                )
            kind, value = answer
            if kind != "ok":
                return self._fall_back(
                    problem, started, SolveOutcome.FAILED, f"{value}; greedy allocation used"
                )
            seconds = time.monotonic() - started
            return Solve(
                allocation=value,
                outcome=SolveOutcome.SOLVED,
                seconds=seconds,
                message=f"{policy}: objective {value.objective:.6g} in {seconds:.3f} s by {value.solver}",
            )

    async def kill(self) -> None:
        """End the process, now."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        # Closing the transport here keeps its finaliser from running after the loop has ended.
        process._transport.close()  # type: ignore[attr-defined]

    async def _ask(self, question: object) -> tuple[str, Any]:
        process = await asyncio.wait_for(self._started(), self._settings.start_seconds)
        assert process.stdin is not None
        process.stdin.write(encode(question))
        async with asyncio.timeout(self._settings.limit_seconds):
            await process.stdin.drain()
            answer: tuple[str, Any] = await _receive(process)
            return answer

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        await _receive(self._process)
        return self._process

    @staticmethod
    def _fall_back(problem: Problem, started: float, outcome: SolveOutcome, message: str) -> Solve:
        logger.warning("solver fallback reason=%s: %s", outcome, message)
        allocation = greedy(problem)
        return Solve(
            allocation=allocation, outcome=outcome, message=message, seconds=time.monotonic() - started
        )


async def _receive(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    try:
        header = await process.stdout.readexactly(HEADER.size)
        return pickle.loads(await process.stdout.readexactly(HEADER.unpack(header)[0]))
    except asyncio.IncompleteReadError:
        code = await process.wait()
        raise _ProcessDied(f"exit code {code}") from None
