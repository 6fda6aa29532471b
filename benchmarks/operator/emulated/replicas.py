"""Operators as processes of their own, and what they cost: CPU seconds, memory, pages that answer late."""

import asyncio
import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from ballast_operator.local_operator import operator_command

_PORT = re.compile(r"serving /healthz, /readyz and /metrics on port (\d+)")
_TICKS_PER_SECOND = 100.0


class Replica:
    """One operator.

    Attributes:
        health_seconds: how long each ``/healthz`` took, while :meth:`watch_health` runs.
    """

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self._log = log
        self.started = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                operator_command(kubeconfig, settings={}), stdout=output, stderr=subprocess.STDOUT
            )
        self.health_seconds: list[float] = []
        self._ports: list[int] = []
        self._read = 0

    async def port(self) -> int:
        """Port of its pages, once it serves them."""
        while True:
            with self._log.open() as log:
                log.seek(self._read)
                for line in log:
                    self._read += len(line.encode())
                    if found := _PORT.search(line):
                        self._ports.append(int(found[1]))
            if self._ports:  # one that starts afresh has another
                return self._ports[-1]
            if self.process.poll() is not None:
                raise RuntimeError(f"the operator ended with code {self.process.returncode}: {self._log}")
            await asyncio.sleep(0.05)

    def restarts(self) -> int:
        """Number of times it has restarted, as its Lease had lapsed."""
        return max(0, len(self._ports) - 1)

    async def watch_health(self) -> None:
        """Ask for ``/healthz`` ten times a second, until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            while True:
                url = f"http://127.0.0.1:{await self.port()}/healthz"
                begun = time.monotonic()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as answer:
                        await answer.read()
                self.health_seconds.append(time.monotonic() - begun)
                await asyncio.sleep(0.1)

    async def metrics(self) -> dict[str, float]:
        """The series of ``/metrics`` with their values; labels are part of the name."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{await self.port()}/metrics") as answer,
        ):
            lines = (await answer.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def until(self, name: str, least: float, *, limit_seconds: float = 120.0) -> float:
        """Wait until a series has reached a value; returns the monotonic time."""
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                if (await self.metrics()).get(name, 0.0) >= least:
                    return time.monotonic()
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{name} is not {least:g} after {limit_seconds:g} s: {self._log}")

    def cpu_seconds(self) -> float:
        """CPU seconds of the operator and its solver, so far."""
        return sum(_cpu(pid) for pid in self._pids())

    def memory_mib(self) -> dict[str, float]:
        """Resident memory: the operator, and the operator with its solver."""
        sizes = [_resident(pid) for pid in self._pids()]
        return {"operator": sizes[0], "withSolver": sum(sizes)}

    def _pids(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Gracefully, the Lease given back."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def _cpu(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return 0.0


def _resident(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0


def writes(metrics: Mapping[str, float]) -> float:
    """All writes to the API server."""
    return sum(value for name, value in metrics.items() if name.startswith("ballast_api_writes_total"))
