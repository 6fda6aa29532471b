"""Real trainer processes for tests: a gang of ranks that talk over gloo, or over NCCL (``make test-cuda``).

The ranks are forked from a server process that has torch imported, so that a gang starts in
tenths of a second rather than seconds.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from ballast_policies.contract.plan import Plan
from ballast_trainer.channel.base import DirectoryChannel

from tests.support.ports import free_port
from tests.support.waiting import WAIT_SECONDS, eventually


def forks() -> ForkServerContext:
    """Processes forked from one that has what trainers import (``preloaded.py``)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


def device_variables(name: str) -> dict[str, str]:
    """The variables with which a rank computes on the tests' device: the CPU, but for ``make test-cuda``.

    Ranks may share a GPU there: NCCL takes each of them for a host of its own, and they talk over sockets.
    """
    if os.environ.get("BALLAST_TEST_DEVICE", "cpu") == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}


def assert_same_curve(
    losses: Mapping[int, float], reference: Mapping[int, float], *, within: float = 1e-5
) -> None:
    """The same steps, and about the same loss at each."""
    assert sorted(losses) == sorted(reference)
    apart = {step: abs(loss - reference[step]) for step, loss in losses.items()}
    # Each by itself: the largest of several may leave out one that is no number.
    assert all(gap < within for gap in apart.values()), apart


class Gang:
    """Ranks of one job: their processes, exit codes and what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, BaseProcess] = {}

    @classmethod
    def run(
        cls,
        folder: Path,
        config: Mapping[str, Any],
        *,
        ranks: int,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        local: bool = False,
    ) -> "Gang":
        """``ballast-train run`` as torchrun would start it; ``local``: one process, ``run``, with --ranks."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(dict(config)))
        gang = cls(folder)
        arguments = ["run", "--config", str(path), "--log", "json", *options]
        if local:
            gang.start("run", [*arguments, "--ranks", str(ranks)], variables or {})
            return gang
        port = free_port()
        for rank in range(ranks):
            environment = {**(variables or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"})
            gang.start(f"rank-{rank}", arguments, environment)
        return gang

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one process; its output goes to ``<name>.out`` and ``<name>.err``."""
        process = forks().Process(
            target=_main, args=(os.fspath(self.folder), name, list(arguments), dict(environment))
        )
        process.start()
        self.processes[name] = process

    def start_pod(self, pod: str, channel: Path, environment: Mapping[str, str] | None = None) -> None:
        """``ballast-train pod`` on the directory channel."""
        log = self.folder / f"{pod}.termination"
        common = {"BALLAST_JOB": "job", "BALLAST_POD_NAME": pod, "BALLAST_CHANNEL": os.fspath(channel)}
        common["BALLAST_TERMINATION_LOG"] = os.fspath(log)
        self.start(pod, ["pod"], {**common, **(environment or {})})

    def start_job(
        self,
        channel: Path,
        config: Mapping[str, Any],
        plan: Plan,
        environment: Mapping[str, str] | None = None,
    ) -> DirectoryChannel:
        """The pods of a plan, on a directory channel that is made for them."""
        made = DirectoryChannel(channel)
        made.publish(plan)
        (channel / "config.json").write_text(json.dumps(config))
        for pod in plan.pods:
            self.start_pod(pod, channel, environment)
        return made

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process."""
        process = self.processes[name]
        assert process.pid is not None
        os.kill(process.pid, number)

    def exit_codes(self) -> dict[str, int]:
        """Wait until all have ended."""
        return {name: self.exit_code(name) for name in self.processes}

    def succeeded(self) -> "Gang":
        """Wait until all have ended, each with 0."""
        assert set(self.exit_codes().values()) == {0}, self.errors()
        return self

    def exit_code(self, name: str) -> int:
        """Wait until one has ended."""
        process = self.processes[name]
        process.join(WAIT_SECONDS)
        assert process.exitcode is not None, (
            f"waited {WAIT_SECONDS:g} s for the end of {name}\n{self.errors()}"
        )
        return process.exitcode

    def lines(self, name: str) -> list[dict[str, Any]]:
        """JSON lines that a process has printed so far, whole ones only."""
        path = self.folder / f"{name}.out"
        text = path.read_text() if path.exists() else ""
        whole = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
        return [json.loads(line) for line in whole if line.startswith("{")]

    def losses(self, name: str = "rank-0") -> dict[int, float]:
        """Loss by step."""
        return {line["step"]: line["loss"] for line in self.lines(name) if "event" not in line}

    def events(self, kind: str, name: str = "rank-0") -> list[dict[str, Any]]:
        """Events of a kind."""
        return [line for line in self.lines(name) if line.get("event") == kind]

    def wait_for_step(self, step: int, name: str = "rank-0") -> None:
        """Wait until a step is printed."""
        eventually(
            lambda: any(done >= step for done in self.losses(name)), f"step {step} of {name}", self.errors
        )

    def has_read(self, epoch: int, name: str = "rank-0") -> bool:
        """Whether a rank has read the plan; it is followed after the step that is then computed."""
        return f"read plan {epoch}:" in (self.folder / f"{name}.err").read_text()

    def wait_for_plan(self, epoch: int, name: str = "rank-0") -> None:
        """Wait until a rank has read the plan."""
        eventually(lambda: self.has_read(epoch, name), f"{name} reads plan {epoch}", self.errors)

    def errors(self) -> str:
        """What all processes wrote to standard error."""
        return "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(self.folder.glob("*.err")))

    def termination(self, pod: str) -> dict[str, Any]:
        """The termination message of a pod."""
        message: dict[str, Any] = json.loads((self.folder / f"{pod}.termination").read_text())
        return message

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            if process.exitcode is None:
                process.kill()
            process.join(WAIT_SECONDS)


def _main(folder: str, name: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(device_variables(name) | environment)
    for stream, suffix in ((1, "out"), (2, "err")):
        target = os.open(Path(folder) / f"{name}.{suffix}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(target, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    from ballast_trainer.cli.main import main

    main(arguments)
