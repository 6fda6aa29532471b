"""Events from a real API server to the caches: how many a second, how late, at what CPU and memory.

    python benchmarks/operator/watches.py --jobs 1000 --known 1000

Jobs are created, and given a status each, while one process after the other watches them: the operator's own
watches, and kopf's in a thread and an event loop of its own, whose ``kopf.on.event`` handlers hand what they
are told to the main loop. The main loop of each works as the operator's does: some milliseconds of Python for
every event.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import kopf
from ballast_localcluster import LocalCluster
from ballast_operator.kube.caches import SELECTORS, WATCHED
from ballast_operator.kube.client import connect
from ballast_operator.kube.informers import Informers
from ballast_operator.kube.kinds import JOB, Kind, Object
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    write_definitions,
)
from ballast_operator.metrics import Metrics
from ballast_operator.settings import ApiSettings
from ballast_operator.waits import Waits
from emulated import objects
from emulated.http import Http
from kubernetes import config
from kubernetes.dynamic import DynamicClient

NEVER = 86_400.0
"""Seconds between two lists: events have to come from the watches."""


def main() -> int:
    """Print a row for each way to watch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="*", default=["own", "kopf"])
    parser.add_argument("--known", type=int, default=1000, help="jobs that are there before")
    parser.add_argument("--jobs", type=int, default=1000, help="jobs that arrive")
    parser.add_argument("--rate", type=float, default=40.0, help="of them a second")
    parser.add_argument(
        "--work", type=float, default=4.0, help="milliseconds of the main loop for each event"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--watch", choices=("own", "kopf"), help=argparse.SUPPRESS)
    parser.add_argument("--kubeconfig", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watch:
        print(json.dumps(asyncio.run(_watch(given))))
        return 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-watches-")))
        cluster = stack.enter_context(LocalCluster(crds=[write_definitions(folder)]))
        with config.new_client_from_config(str(cluster.kubeconfig)) as api:
            apply_objects(DynamicClient(api), install_objects(OPERATOR_NAMESPACE))
        given.kubeconfig = cluster.kubeconfig
        rows = asyncio.run(_all(given))
    if given.output == "json":
        print(json.dumps({"machine": {"cores": os.cpu_count(), "load": os.getloadavg()}, "rows": rows}))
    else:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


async def _all(given: argparse.Namespace) -> list[dict[str, Any]]:
    async with Http(given.kubeconfig) as http:
        known = [objects.waiting_job(index, prefix="known") for index in range(given.known)]
        await asyncio.gather(*(http.send("post", JOB.path("default"), item) for item in known))
        return [await _one(given, http, way, number) for number, way in enumerate(given.ways)]


async def _one(given: argparse.Namespace, http: Http, way: str, number: int) -> dict[str, Any]:
    arguments = [f"--{name}={getattr(given, name)}" for name in ("kubeconfig", "jobs", "work")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--watch", way, *arguments,
        stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await process.stdout.readline()  # it watches
    created: dict[str, float] = {}
    began = time.monotonic()

    async def arrive(index: int) -> None:
        await asyncio.sleep(max(0.0, began + index / given.rate - time.monotonic()))
        item = objects.waiting_job(index, prefix=f"new-{number}")
        await http.send("post", JOB.path("default"), item)
        created[item["metadata"]["name"]] = time.time()
        await http.send("patch", *objects.some_status(item))

    await asyncio.gather(*(arrive(index) for index in range(given.jobs)))
    arrived = time.monotonic() - began
    text, _ = await process.communicate()
    found = json.loads(text)
    late = sorted(max(0.0, found["seen"][name] - at) for name, at in created.items())
    events = 2 * given.jobs
    await asyncio.gather(*(http.send("delete", JOB.path("default", name)) for name in created))
    return {
        "way": way,
        "eventsPerSecond": round(events / (max(found["done"]) - found["first"]), 1),
        "arrivedPerSecond": round(given.jobs / arrived, 1),
        "lateP50Ms": round(1000 * late[len(late) // 2]),
        "lateP99Ms": round(1000 * late[int(len(late) * 0.99)]),
        "lateMaxMs": round(1000 * late[-1]),
        "cpuMsPerEvent": round(1000 * found["cpu"] / events, 2),
        "residentMiB": round(found["mib"]),
        "listedAfterSeconds": round(found["listed"], 2),
    }


async def _watch(given: argparse.Namespace) -> dict[str, Any]:
    """Watch until all that arrive have their status; when each was known first."""
    sys.setswitchinterval(0.001)  # as `ballast operator`
    began = time.monotonic()
    seen: dict[str, float] = {}
    done: dict[str, float] = {}
    work: asyncio.Queue[None] = asyncio.Queue()
    async with await connect(str(given.kubeconfig)) as cluster:
        ways = {"own": Informers, "kopf": InformersOfKopf}
        informers = ways[given.watch](
            cluster,
            namespace="",
            settings=ApiSettings(resync_seconds=NEVER),
            metrics=Metrics(),
            waits=Waits(),
        )

        def stored(kind: Kind, _old: Object | None, new: Object | None) -> None:
            if kind is JOB and new is not None and new["metadata"]["name"].startswith("new-"):
                seen.setdefault(new["metadata"]["name"], time.time())
                if new.get("status"):
                    done[new["metadata"]["name"]] = time.time()
                work.put_nowait(None)

        informers.caches.store_listeners.append(stored)
        workers = [asyncio.create_task(_work(work, given.work / 1000)) for _ in range(8)]
        await informers.refresh()
        listed = time.monotonic() - began
        await asyncio.sleep(4)
        cpu = time.process_time()
        print("watching", flush=True)
        while len(done) < given.jobs or not work.empty():  # noqa: ASYNC110 - looks at the figures
            await asyncio.sleep(0.05)
        result = {
            "seen": seen,
            "done": list(done.values()),
            "first": min(seen.values()),
            "cpu": time.process_time() - cpu,
            "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "listed": listed,
        }
        for task in workers:
            task.cancel()
        await informers.stop()
    return result


async def _work(work: "asyncio.Queue[None]", seconds: float) -> None:
    """As a pass over the job: Python without a pause."""
    while True:
        await work.get()
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)


class InformersOfKopf(Informers):
    """Watches by kopf's public API alone."""

    async def _watch(self) -> None:
        await self._listed.wait()
        loop, caches = asyncio.get_running_loop(), self.caches
        told: deque[tuple[Kind, Any]] = deque()
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.persistence.diffbase_storage = NoStates()
        for kind, selector in SELECTORS.items():
            settings.watching.label_selectors[kind.plural] = selector
        registry = kopf.OperatorRegistry()

        def take() -> None:
            while told:
                kind, event = told.popleft()
                caches.watched(kind, event["type"], event["object"])

        def hand(kind: Kind, event: Any) -> None:
            told.append((kind, event))
            if len(told) == 1:
                loop.call_soon_threadsafe(take)

        def handler(kind: Kind) -> Any:
            async def seen(event: Any, **_: Any) -> None:
                hand(kind, event)

            return seen

        for kind in WATCHED:
            version = kind.api_version.rpartition("/")[2]
            kopf.on.event(kind.group, version, kind.plural, registry=registry, id=kind.plural)(handler(kind))

        async def login(**_: Any) -> kopf.ConnectionInfo:
            configuration = self._cluster.configuration
            header = await configuration.get_api_key_with_prefix("BearerToken") or ""
            return kopf.ConnectionInfo(
                server=configuration.host,
                ca_path=configuration.ssl_ca_cert,
                token=header.rpartition(" ")[2] or None,
                certificate_path=configuration.cert_file,
                private_key_path=configuration.key_file,
            )

        kopf.on.login(registry=registry)(login)
        stop = threading.Event()
        thread = threading.Thread(
            target=lambda: asyncio.run(
                kopf.operator(
                    registry=registry, settings=settings, clusterwide=True, standalone=True, stop_flag=stop
                )
            ),
            daemon=True,
        )
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)


class NoStates(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Nothing is kept of what an object was."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing."""


if __name__ == "__main__":
    sys.exit(main())
