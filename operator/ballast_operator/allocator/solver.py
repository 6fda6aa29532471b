"""Solve allocations in a process of their own, with a hard time limit and a fallback.

An LP of a large cluster takes seconds of pure CPU; on the event loop it would stop heartbeats. The
process lives as long as it answers in time; one that does not is killed, and another is started, while the
fallback answers. The caller always gets an allocation, and the reason if it is the fallback's. The last
answer is kept for as long as it holds.
"""

import asyncio
import contextlib
import dataclasses
import logging
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

from ballast_policies.allocation.problem import Allocation, Problem
from ballast_policies.allocation.registry import greedy, imports_of
from ballast_policies.scheduling.decision import SolveRequest

from ballast_operator.allocator.solver_process import HEADER, encode, preparation
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.metrics import Metrics
from ballast_operator.settings import SolverSettings

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")

COMMAND = (sys.executable, "-m", "ballast_operator.allocator.solver_process")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solve:
    """An allocation, and how it was computed.

    Attributes:
        seconds: from the question to the answer; with the fallback, all of the time that it took.
        outcome: a reason of the policy's condition Solved.
        health: a reason of the policy's condition SolverHealthy.
    """

    allocation: Allocation
    outcome: PolicyReason
    message: str
    seconds: float
    health: PolicyReason = PolicyReason.SOLVER_ANSWERS


class _ProcessDied(Exception):  # noqa: N818
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    """Reason for the fallback: values of the conditions SolverHealthy and Solved, and their message."""

    health: PolicyReason
    why: str
    outcome: PolicyReason = PolicyReason.FALLBACK_AFTER_SOLVER_ERROR


class Solver:
    """A solver process, restarted as needed. Use as an async context manager."""

    def __init__(self, settings: SolverSettings, *, command: tuple[str, ...] = COMMAND) -> None:
        self._settings = settings
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._imported: set[str] = set()
        self._lock = asyncio.Lock()
        self._failed: _Failure | None = None
        self._restart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Solver":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def warm_up(self) -> None:
        """Start the process before the next question; where that fails, the question says so."""
        async with self._lock:
            if self._restart is not None:
                await asyncio.gather(self._restart, return_exceptions=True)
                return
            try:
                async with asyncio.timeout(self._settings.start_seconds):
                    await self._started()
            except (TimeoutError, _ProcessDied, OSError) as error:
                logger.warning("the solver did not start: %s", error or "no answer")
                await self.kill()

    async def solve(
        self,
        policy: str,
        problem: Problem,
        *,
        limit_seconds: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Solve:
        """The policy's allocation of ``problem``, or the greedy one where the solver fails or is late."""
        limit = self._settings.limit_seconds if limit_seconds is None else limit_seconds
        async with self._lock:
            started = time.monotonic()

            def fall_back(failure: _Failure) -> Solve:
                message = f"{failure.why}; greedy allocation used"
                logger.warning("solver fallback reason=%s: %s", failure.outcome, message)
                return Solve(
                    allocation=greedy(problem),
                    outcome=failure.outcome,
                    message=message,
                    seconds=time.monotonic() - started,
                    health=failure.health,
                )

            if self._process is not None and self._process.returncode is not None:
                await self._start_again(_died(f"exit code {self._process.returncode}"))
            if self._failed is not None:
                if self._restart is None or self._restart.done():
                    await self._start_again(self._failed)
                return fall_back(self._failed)
            try:
                process = await self._ready(imports_of(policy, problem))
                asked = time.monotonic()
                kind, value = await self._ask(process, (policy, problem, dict(options or {})), limit)
            except asyncio.CancelledError:
                await self.kill()  # its answer must not be taken for that of the next question
                raise
            except TimeoutError:
                why = (
                    f"the solver was killed after {time.monotonic() - started:.1f} s "
                    f"({len(problem.jobs)} jobs, limit {limit:g} s), and is being started again"
                )
                failure = _Failure(PolicyReason.SOLVER_TIMED_OUT, why, PolicyReason.FALLBACK_AFTER_TIMEOUT)
            except (_ProcessDied, OSError) as error:
                failure = _died(error)
            else:
                if kind != "ok":
                    return fall_back(_Failure(PolicyReason.SOLVER_ANSWERS, str(value)))
                seconds = time.monotonic() - asked
                return Solve(
                    allocation=value,
                    outcome=PolicyReason.OPTIMAL,
                    seconds=seconds,
                    message=f"{policy}: objective {value.objective:.6g} in {seconds:.3f} s by {value.solver}"
                    + "".join(f"; {line}" for line in value.fallbacks),
                )
            await self._start_again(failure)
            return fall_back(failure)

    async def answer(self, function: Callable[[Q], A], question: Q) -> A:
        """Answer of ``function``, of a module, to ``question`` in the process.

        Raises:
            TimeoutError: it took longer than an allocation may.
            ConnectionError: the process ended meanwhile; the next question starts another.
            OSError: of another kind: no process starts.
            ValueError: the function raised an error.
        """
        async with self._lock:
            try:
                try:
                    process = await self._ready({function.__module__})
                except (TimeoutError, _ProcessDied, OSError) as error:
                    raise OSError(f"no process starts: {error or 'no answer in time'}") from error
                kind, value = await self._ask(process, (function, question, {}), self._settings.limit_seconds)
            except _ProcessDied as error:
                await self.kill()
                raise ConnectionError(f"the process died ({error})") from None
            except BaseException:
                await self.kill()  # its answer must not be taken for that of the next question
                raise
        if kind != "ok":
            raise ValueError(value)
        found: A = value
        return found

    async def kill(self) -> None:
        """End the process, now."""
        restart, self._restart = self._restart, None
        if restart is not None:
            restart.cancel()
            await asyncio.gather(restart, return_exceptions=True)
        await self._end()

    async def _start_again(self, failed: _Failure) -> None:
        """End the process, and start another beside what is done meanwhile."""
        await self.kill()
        self._failed = failed
        self._restart = asyncio.create_task(self._started_again(self._imported.copy()))

    async def _started_again(self, imported: set[str]) -> None:
        try:
            await self._ready(imported)
            self._failed = None
        except (TimeoutError, _ProcessDied, OSError) as error:
            logger.warning("the solver did not start again: %s", error or "no answer")
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        # Closing the transport here keeps its finaliser from running after the loop has ended.
        process._transport.close()  # type: ignore[attr-defined]

    @staticmethod
    async def _ask(
        process: asyncio.subprocess.Process, question: object, limit_seconds: float
    ) -> tuple[str, Any]:
        assert process.stdin is not None
        process.stdin.write(encode(question))
        async with asyncio.timeout(limit_seconds):
            await process.stdin.drain()
            answer: tuple[str, Any] = await _receive(process)
            return answer

    async def _ready(self, imports: Set[str]) -> asyncio.subprocess.Process:
        """The process, once it has imported its modules. Raises TimeoutError: not in a start's time."""
        async with asyncio.timeout(self._settings.start_seconds):
            process = await self._started()
            if missing := imports - self._imported:
                await self._ask(process, preparation(*missing), self._settings.start_seconds)
                self._imported |= missing
            return process

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._imported.clear()
        await _receive(self._process)
        logger.info("solver process started pid=%d", self._process.pid)
        return self._process


def _died(how: object) -> _Failure:
    return _Failure(
        PolicyReason.SOLVER_DIED, f"the solver's process died ({how}), and is being started again"
    )


async def _receive(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    try:
        header = await process.stdout.readexactly(HEADER.size)
        return pickle.loads(await process.stdout.readexactly(HEADER.unpack(header)[0]))
    except asyncio.IncompleteReadError:
        code = await process.wait()
        raise _ProcessDied(f"exit code {code}") from None


class LastAnswer:
    """Keeps the last answer for as long as it holds."""

    def __init__(self, solver: Solver, metrics: Metrics) -> None:
        self._solver = solver
        self._metrics = metrics
        for outcome in (PolicyReason.FALLBACK_AFTER_TIMEOUT, PolicyReason.FALLBACK_AFTER_SOLVER_ERROR):
            metrics.solve_fallbacks.labels(outcome)
        self._last: tuple[SolveRequest, Solve] | None = None

    async def solve(self, policy: ClusterPolicy, request: SolveRequest, *, within_round: bool) -> Solve:
        """The policy's allocation; the last one again where nothing has changed.

        ``within_round``: values that have changed are taken up at the round's end.
        """
        if self._last is not None:
            asked, last = self._last
            if request.structure == asked.structure and (within_round or request.values == asked.values):
                return last
        name = request.objective
        solve = await self._solver.solve(
            name,
            request.problem,
            limit_seconds=policy.spec.solver.time_limit_seconds,
            options={"agnostic": policy.spec.objective.heterogeneity_agnostic},
        )
        self._metrics.solve_seconds.labels(name).observe(solve.seconds)
        if solve.outcome is PolicyReason.OPTIMAL:
            self._last = request, solve
        else:
            self._metrics.solve_fallbacks.labels(solve.outcome).inc()
            self._last = None
        logger.info("solved jobs=%d: %s", len(request.problem.jobs), solve.message)
        return solve
