"""A run on emulated nodes: API clients, replicas of the operator, what was seen of the jobs that arrive."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ballast_operator.kube.kinds import JOB, NODE, POD, POLICY
from ballast_policies.contract.messages import JOB_LABEL

from emulated import objects
from emulated.http import Http
from emulated.replicas import Replica


class Seen:
    """Times at which the API server reported each job's changes, on the monotonic clock."""

    def __init__(self) -> None:
        self.created: dict[str, float] = {}
        self.decided: dict[str, float] = {}
        self.pods: dict[str, float] = {}
        self.running: set[str] = set()

    def note_created(self, name: str) -> None:
        """The job is being created now."""
        self.created.setdefault(name, time.monotonic())

    async def jobs(self, http: Http) -> None:
        """Follow the TrainingJobs until cancelled."""
        async for now, _, item in http.watch(JOB):
            name, status = item["metadata"]["name"], item.get("status") or {}
            conditions = {c["type"]: c for c in status.get("conditions") or []}
            if (
                conditions.get("Admitted", {}).get("reason", "Pending") != "Pending"
                and "Running" in conditions
            ):
                self.decided.setdefault(name, now)
            if conditions.get("Running", {}).get("status") == "True":
                self.running.add(name)

    async def gangs(self, http: Http) -> None:
        """Follow the pods until cancelled."""
        async for now, _, item in http.watch(POD, query=f"&labelSelector={JOB_LABEL}"):
            self.pods.setdefault(item["metadata"]["labels"][JOB_LABEL], now)


class EmulatedRun:
    """State that the phases of a run share."""

    _http: Http
    _apart: Http

    def __init__(self, given: argparse.Namespace, kubeconfig: Path, account: Path, logs: Path) -> None:
        self._given, self._kubeconfig, self._account, self._logs = given, kubeconfig, account, logs
        self._seen = Seen()
        self._figures: dict[str, float] = {}
        self._replicas = 0
        self._all: list[Replica] = []

    def _start(self) -> Replica:
        self._replicas += 1
        replica = Replica(self._account, self._logs / f"operator-{self._replicas}.log")
        self._all.append(replica)
        return replica

    def _say(self, text: str) -> None:
        print(
            f"{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}: {text}", file=sys.stderr, flush=True
        )

    async def _objects(self) -> None:
        nodes = [objects.node(index) for index in range(self._given.nodes - 1)]
        nodes.append(objects.scarce_node())
        await asyncio.gather(*(self._http.send("post", NODE.path(), node) for node in nodes))
        await asyncio.gather(*(self._mark(node) for node in nodes))
        await self._http.send("post", POLICY.path(), objects.policy())
        self._say(f"{len(nodes)} emulated nodes")

    async def _mark(self, node: dict[str, Any]) -> None:
        path = NODE.path("", node["metadata"]["name"])
        await self._http.send("patch", path + "/status", {"status": node["status"]})
        await self._http.send("patch", path, {"spec": {"taints": None}})

    async def _create(self, items: list[dict[str, Any]], http: Http | None = None) -> None:
        """Create jobs; the time counts from when each request is sent."""

        async def one(item: dict[str, Any]) -> None:
            name = item["metadata"]["name"]
            await (http or self._http).send(
                "post", JOB.path("default"), item, sent=lambda: self._seen.note_created(name)
            )

        await asyncio.gather(*map(one, items))

    async def _arrive(self, waiting: int, fitting: int, *, prefix: str = "") -> tuple[float, float]:
        """Create jobs as fast as the API server takes them, beside them each second one that fits.

        Returns:
            When the last that waits was there, and when the first was sent.
        """
        began = time.monotonic()

        async def fit() -> None:
            for index in range(fitting):
                await self._create([objects.fitting_job(index, prefix=f"{prefix}fits")], self._apart)
                await asyncio.sleep(1)

        async def wait() -> float:
            await self._create(
                [objects.waiting_job(index, prefix=f"{prefix}waits") for index in range(waiting)]
            )
            return time.monotonic()

        arrived, _ = await asyncio.gather(wait(), fit())
        return arrived, began

    @staticmethod
    def _per_thousand(seconds: float, jobs: int) -> float:
        return seconds / jobs * 1000

    def _percentiles(self, name: str, seconds: list[float]) -> None:
        ordered = sorted(seconds)
        self._figures[f"{name}P50Seconds"] = ordered[len(ordered) // 2]
        self._figures[f"{name}P99Seconds"] = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    async def _until_served(self, prefix: str) -> None:
        """A job that fits is handed in, and has its pod."""
        item = objects.fitting_job(0, prefix=prefix)
        await self._create([item])
        await self._until(lambda: item["metadata"]["name"] in self._seen.pods, f"the pod of {prefix}")

    async def _until_quiet(self, replica: Replica) -> None:
        """Wait until no key is due for two seconds: all jobs have been looked at."""
        quiet = 0
        while quiet < 4:
            quiet = quiet + 1 if (await replica.metrics()).get("ballast_queue_due", 0.0) == 0 else 0
            await asyncio.sleep(0.5)

    async def _until(self, done: Callable[[], bool], what: str, *, limit_seconds: float = 400.0) -> None:
        deadline = time.monotonic() + limit_seconds
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not reached in {limit_seconds:g} s: {what}; logs: {self._logs}")
            if self._all and all(replica.process.poll() is not None for replica in self._all):
                raise RuntimeError(f"the operator ended while waiting for {what}; logs: {self._logs}")
            await asyncio.sleep(0.1)
