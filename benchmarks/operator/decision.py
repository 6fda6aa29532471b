"""One decision of the allocator at a large cluster, by parts, without a cluster: CPU and wall seconds.

python benchmarks/operator/decision.py --jobs 5000 --nodes 1000 --profile
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from typing import Any

from ballast_operator.allocator.allocator import Allocator, DecisionThrottle
from ballast_operator.allocator.costs.price_feeds import PriceFeeds
from ballast_operator.allocator.policy_status import PolicyReporter
from ballast_operator.allocator.saved_state import StateStore
from ballast_operator.allocator.solver import Solver
from ballast_operator.errors import NotFound
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, NODE, POLICY
from ballast_operator.metrics import Metrics
from ballast_operator.observation.events import Recorder
from ballast_operator.observation.observer import Observer
from ballast_operator.settings import SolverSettings
from ballast_operator.views.clock import now
from ballast_operator.waits import Waits
from ballast_policies.protocol.observed import Action
from emulated import objects


class Silent:
    """A cluster that takes every write, and stores nothing."""

    def __init__(self) -> None:
        self.writes = 0

    async def get(self, kind: Any, namespace: str, name: str) -> Any:
        """Nothing is stored."""
        raise NotFound(name)

    async def write(self, kind: Any, body: Any) -> Any:
        """Nothing happens, as a new version."""
        self.writes += 1
        return {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.writes)}}

    write_status = apply = create = write


class Fill:
    """Puts objects into caches as a watch would."""

    def __init__(self, caches: Caches) -> None:
        self.caches, self.version = caches, 0

    def put(self, kind: Any, item: dict[str, Any]) -> None:
        """A new version of an object."""
        self.version += 1
        metadata = item["metadata"]
        metadata.setdefault("uid", f"uid-{kind.kind}-{metadata['name']}")
        metadata["resourceVersion"] = str(self.version)
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", f"2026-01-01T00:00:{self.version % 60:02d}Z")
        self.caches.watched(kind, "ADDED", item)


async def inline(work: Any, *arguments: Any, **named: Any) -> Any:
    """Result of a call in place of a thread, which the profiler does not see."""
    return work(*arguments, **named)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", default="max-min-fairness")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    if given.profile:
        asyncio.to_thread = inline
    caches, metrics, cluster = Caches(), Metrics(), Silent()
    fill, observer = Fill(caches), Observer(caches)
    fill.put(POLICY, objects.policy(objective=given.policy))
    for index in range(given.nodes):
        fill.put(NODE, objects.node(index))
    for index in range(given.jobs):
        fill.put(JOB, objects.job(index))
    async with Solver(SolverSettings(limit_seconds=60)) as solver:
        await solver.warm_up()
        allocator = Allocator(
            observer,
            solver,
            settings=SolverSettings(),
            metrics=metrics,
            enqueue=lambda *_: None,
            enqueue_in_turn=lambda *_: None,
            waits=Waits(),
            throttle=DecisionThrottle(0.0),
            store=StateStore(cluster, "ballast-system"),
            feeds=PriceFeeds(cluster, "ballast-system"),
            reporter=PolicyReporter(cluster, caches, Recorder(cluster), clock=now),
        )
        rows = []
        for repeat in range(given.repeats):
            if repeat == 1:
                for key, at in observer.decided.assignments.items():
                    if at.action is Action.PLACE:
                        item = dict(caches[JOB].get(key))
                        fill.put(
                            JOB, {**item, "metadata": dict(item["metadata"]), "status": running(at, key)}
                        )
            if repeat > 1:
                fill.put(JOB, objects.job(given.jobs + repeat))
            profile = cProfile.Profile() if given.profile and repeat == given.repeats - 1 else None
            wall, cpu = time.perf_counter(), time.process_time()
            if profile:
                profile.enable()
            await allocator.decide()
            if profile:
                profile.disable()
                pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
            rows.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
            print(
                json.dumps(rows[-1]),
                sum(a.action is Action.KEEP for a in observer.decided.assignments.values()),
                flush=True,
            )


def running(at: Any, key: Any) -> dict[str, Any]:
    return {
        "launches": 1,
        "allocation": {
            "launch": 1,
            "gpuType": at.placement.gpu_type,
            "pool": at.placement.pool,
            "gpus": len(at.placement.nodes),
            "pods": [f"{key[1]}-1-{n}" for n in range(len(at.placement.nodes))],
            "nodes": list(at.placement.nodes),
            "planId": "x",
            "since": "2026-11-22T02:00:00Z",
        },
    }


asyncio.run(main())
