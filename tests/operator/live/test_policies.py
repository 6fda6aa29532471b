"""A ClusterPolicy whose solver hangs and dies, on a real API server with trainers that are processes."""

import contextlib
import fcntl
import os
import re
import signal
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import watch

from tests.operator.live.conftest import Stage, cluster_policy
from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]

POLICIES = {"group": "ballast.dev", "version": "v1alpha1", "plural": "clusterpolicies", "name": "live"}
ENDLESS = {"total": 1_000_000}


class Policy:
    """The one ClusterPolicy, as an administrator sees it."""

    def __init__(self, custom: Any) -> None:
        self._custom = custom

    def patch(self, **spec: Any) -> None:
        self._custom.patch_cluster_custom_object(body={"spec": spec}, **POLICIES)

    def choose(self, name: str) -> None:
        """The change of one line."""
        self.patch(objective={"policy": name})

    @property
    def status(self) -> dict[str, Any]:
        return self._custom.get_cluster_custom_object(**POLICIES).get("status") or {}

    def condition(self, kind: str) -> dict[str, Any]:
        return condition_of(self.status, kind)

    @property
    def version(self) -> str:
        """From which :meth:`first_status` can look."""
        return self._custom.get_cluster_custom_object(**POLICIES)["metadata"]["resourceVersion"]

    def first_status(self, since: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status after a version for which this holds, also one that lasted for a moment only."""
        seen = []
        for change in watch.Watch().stream(
            self._custom.list_cluster_custom_object,
            **{key: POLICIES[key] for key in ("group", "version", "plural")},
            field_selector=f"metadata.name={POLICIES['name']}",
            resource_version=since,
            timeout_seconds=int(WAIT_SECONDS),
        ):
            seen.append(change["object"].get("status") or {})
            if holds(seen[-1]):
                return seen[-1]
        raise AssertionError(f"in {WAIT_SECONDS:g} s the ClusterPolicy had these statuses only: {seen}")

    def verdict(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        found = self.condition(kind)
        return found.get("status", ""), found.get("reason", "")

    def wait_for_round(self, name: str) -> dict[str, Any]:
        """The last round, once it was decided by policy ``name``."""

        def last() -> dict[str, Any] | None:
            found = self.status.get("lastRound", {})
            return found if found.get("policy") == name else None

        return eventually(last, f"a round by {name}")


@pytest.fixture
def policy(stage: Stage) -> Iterator[Policy]:
    """Put back as it was."""
    yield Policy(stage.custom)
    old = stage.custom.get_cluster_custom_object(**POLICIES)
    fresh = {**old, "spec": cluster_policy()["spec"]}
    stage.custom.replace_cluster_custom_object(body=fresh, **POLICIES)


def solver_pid(log: Path) -> int:
    """The newest solver process of an operator."""
    return int(
        eventually(
            lambda: re.findall(r"solver process started pid=(\d+)\s", log.read_text()), "a solver's process"
        )[-1]
    )


def unread_bytes(pid: int) -> int:
    """Bytes that wait on the standard input of a process."""
    with contextlib.closing(
        os.fdopen(os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK), "rb")
    ) as pipe:
        return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]


def test_a_solver_that_hangs_or_dies_is_replaced_and_said_so(stage, policy):
    """SolverHealthy is False with its reason while the fallback decides; then a new process answers."""

    def answers() -> None:
        eventually(
            lambda: policy.verdict("SolverHealthy") == ("True", "SolverAnswers"), "a solver that answers"
        )

    with stage.operator() as life:
        stage.add_job("one", stages=1, script=ENDLESS)
        stage.wait_for("one", "Running")
        answers()

        since = policy.version
        os.kill(solver_pid(life.log), signal.SIGSTOP)
        policy.patch(solver={"timeLimitSeconds": 2}, objective={"policy": "proportional"})
        fallback = policy.first_status(
            since, lambda status: reason(status, "SolverHealthy") == "SolverTimedOut"
        )
        # The limit is that of the decision: one may have been asked for before the limit was changed.
        assert re.search(
            r"\(1 jobs, limit (2|10) s\), and is being started again; greedy allocation used",
            message(fallback, "SolverHealthy"),
        )
        assert reason(fallback, "Solved") == "FallbackAfterTimeout"
        assert fallback["lastRound"]["policy"] == "greedy"
        # Longer than the test takes to kill a process over its next question.
        policy.patch(solver={"timeLimitSeconds": 600})
        eventually(lambda: policy.status.get("observedGeneration") == _generation(stage), "the new limit")
        answers()
        policy.wait_for_round("proportional")

        since, pid = policy.version, solver_pid(life.log)
        os.kill(pid, signal.SIGSTOP)
        policy.choose("fifo")
        eventually(lambda: unread_bytes(pid) > 0, "a question to the solver")
        os.kill(pid, signal.SIGKILL)
        fallback = policy.first_status(since, lambda status: reason(status, "SolverHealthy") == "SolverDied")
        assert "exit code -9" in message(fallback, "SolverHealthy")
        assert reason(fallback, "Solved") == "FallbackAfterSolverError"
        answers()
        policy.wait_for_round("fifo")
        assert life.code is None
        assert stage.state("one") == "Running"
        assert stage.status("one")["launches"] == 1


def condition_of(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})


def reason(status: dict[str, Any], kind: str) -> str:
    return condition_of(status, kind).get("reason", "")


def message(status: dict[str, Any], kind: str) -> str:
    return condition_of(status, kind).get("message", "")


def _generation(stage: Stage) -> int:
    return stage.custom.get_cluster_custom_object(**POLICIES)["metadata"]["generation"]
