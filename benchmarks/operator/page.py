"""The page at 5,000 jobs: how long the first screen takes, and what it adds to the operator's memory.

    python benchmarks/operator/page.py

Two processes see the same changes of 5,000 jobs until all that the page remembers is as full as it gets;
one has the page. Each time is of a new look at the caches, over HTTP, with styles and scripts, in seconds
of CPU: other work on the machine adds to those of the wall. The API server is not asked who somebody is, as
it is once a minute.
"""

import argparse
import asyncio
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import aiohttp
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, POLICY
from emulated import objects
from memory import put, resident_mib
from memory import status as trains

LIMITS = {"first screen, CPU s": 0.5, "slowest of five screens, CPU s": 0.5, "memory, MiB": 50.0}
NOW = 1_900_000_000.0
NAMESPACES, LAUNCHES, STEPS = 50, 5, 30
STATIC = ("page.css", "uPlot.min.css", "htmx.min.js", "uPlot.iife.min.js", "page.js")


class Everybody:
    """Lets everybody in."""

    async def person(self, token: str) -> Any:
        """Person of any token."""
        from ballast_operator.page.access import Person

        return Person(name=token)

    async def namespaces(self, person: Any, there_are: Iterable[str]) -> frozenset[str]:
        """All."""
        return frozenset(there_are)

    def waits_for(self, person: Any) -> int:
        """Nothing."""
        return 0

    async def sees_policies(self, person: Any) -> bool:
        """Yes."""
        return True


class Cluster:
    """Caches whose jobs train, are moved and launched again; ``page``: with what it needs."""

    def __init__(self, *, page: bool) -> None:
        self.now, self.caches = NOW, Caches()
        self.page: Any = None
        if page:
            from ballast_operator.history.recent import Recent
            from ballast_operator.page.server import Page

            self.recent = Recent(self.caches, clock=lambda: self.now)
            self.page = Page(self.recent, Everybody())

    def time(self) -> str:
        """Now, as the API has it."""
        return datetime.datetime.fromtimestamp(self.now, datetime.UTC).isoformat()

    def live(self, jobs: int) -> None:
        """All launches of all jobs."""
        for launch in range(1, LAUNCHES + 1):
            for step in range(STEPS):
                self.now += 60
                self.decided(launch)
                for index in range(jobs):
                    self.changed(index, launch, step)
                if self.page is not None:
                    self.recent.work_out()

    def changed(self, index: int, launch: int, step: int) -> None:
        """The watch brings a job."""
        item = objects.job(index, namespace=f"team-{index % NAMESPACES}")
        held = trains([f"{item['metadata']['name']}-{launch}-{rank}" for rank in range(4)])
        pool = list(objects.TYPES)[(index + launch) % len(objects.TYPES)]
        held["allocation"] |= {"launch": launch, "pool": pool, "gpuType": pool, "since": self.time()}
        item["status"] = {
            **held,
            "state": "Running",
            "launches": launch,
            "progress": {"step": 100 * step, "loss": 1 / (1 + step), "stepsPerSecond": 2.0 + index % 7},
            "conditions": [
                {
                    "type": kind,
                    "status": "True",
                    "reason": "Emulated",
                    "message": "all ranks train",
                    "lastTransitionTime": self.time(),
                }
                for kind in ("Admitted", "Running")
            ],
            "lastDecision": {
                "planId": f"round-{launch}",
                "chosen": f"4 x {pool}",
                "nextBest": f"4 x {pool}: {index % 90} steps/s less",
                "why": f"its share is {index % 100} %",
            },
        }
        put(self.caches, JOB, item)

    def decided(self, launch: int) -> None:
        """The watch brings the policy, with the last round."""
        item = objects.policy()
        pools = [{"pool": kind, "gpuType": kind, "gpus": 8000, "gpusHeld": 7000} for kind in objects.TYPES]
        item["status"] = {
            "gpus": 32_000,
            "capacity": [{**pool, "capacityType": "spot", "nodes": 1000} for pool in pools],
            "bill": [
                {**pool, "since": self.time(), "pricePerGpuHour": 2.5, "cost": 30.0, "heldCost": 12.5}
                for pool in pools
            ],
            "billAt": self.time(),
            "lastRound": {
                "planId": f"round-{launch}",
                "time": self.time(),
                "policy": "max-min-fairness",
                "solveSeconds": 0.1,
                "objectiveValue": 0.5,
                "gap": 1e-9,
            },
        }
        put(self.caches, POLICY, item)

    async def screens(self, jobs: int) -> dict[str, list[float]]:
        """Seconds of CPU, of page and reader, for each screen, each time by a new look."""
        from ballast_operator.page.server import LOOK_SECONDS, serving

        one = objects.job(0, namespace="team-0")["metadata"]
        paths = ("/", "/jobs", f"/jobs/team-0/{one['name']}", "/teams", "/decisions")
        headers = {"Authorization": "Bearer x"}
        found: dict[str, list[float]] = {path: [] for path in paths}
        async with (
            serving(self.page, host="127.0.0.1", port=0) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as client,
        ):

            async def read(path: str) -> str:
                async with client.get(path) as answer:
                    answer.raise_for_status()
                    return await answer.text()

            for _ in range(11):
                for path in paths:
                    self.now += 2 * LOOK_SECONDS
                    began = time.process_time()
                    text = await read(path)
                    for name in STATIC:
                        await read(f"/static/{name}")
                    found[path].append(time.process_time() - began)
                    assert path != "/jobs" or f"of {jobs} jobs" in " ".join(text.split())
        return found


def child(jobs: int, *, page: bool) -> dict[str, Any]:
    cluster = Cluster(page=page)
    cluster.live(jobs)
    seconds = asyncio.run(cluster.screens(jobs)) if page else {}
    return {"mib": resident_mib(), "seconds": seconds}


def main() -> None:
    """Print figures, limits, and their ratio; fail where one is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=5_000)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--child", choices=("plain", "page"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.jobs, page=given.child == "page")))
        return
    plain, page = (
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "--jobs", str(given.jobs), "--child", kind],
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
        )
        for kind in ("plain", "page")
    )
    medians = {path: statistics.median(each) for path, each in page["seconds"].items()}
    figures = {
        "first screen, CPU s": page["seconds"]["/"][0],
        "slowest of five screens, CPU s": max(medians.values()),
        "memory, MiB": page["mib"] - plain["mib"],
    }
    ratios = {name: figure / LIMITS[name] for name, figure in figures.items()}
    if given.output == "json":
        print(json.dumps({"jobs": given.jobs, "figures": figures, "ratios": ratios, "medians": medians}))
    else:
        for name, figure in figures.items():
            print(f"{name:31} {figure:8.3f}   limit {LIMITS[name]:6.2f}   {ratios[name]:.2f} of it")
    if max(ratios.values()) > 1:
        raise SystemExit("a limit is exceeded")


if __name__ == "__main__":
    main()
