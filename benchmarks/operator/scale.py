"""The operator at 5,000 jobs and 1,000 nodes, on a real API server: service levels with their ranges.

    python benchmarks/operator/scale.py --output json

etcd, kube-apiserver, kube-controller-manager and kube-scheduler are real. Nodes and trainers are emulated as
KWOK does it: Node objects that are Ready without a kubelet, pods whose status one program writes, reports of
rank 0 without training. All of it shares this machine, whose load is printed with the figures.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ballast_localcluster import LocalCluster
from ballast_localcluster.components import Settings
from ballast_operator.kube.kinds import JOB
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    write_definitions,
    write_operator_kubeconfig,
)
from ballast_policies.contract.messages import RENEW_SECONDS
from emulated import objects
from emulated.fleet import Fleet
from emulated.http import Http
from emulated.least import LeastRequests
from emulated.ranges import QUICK_RANGES, RANGES, compare
from emulated.replicas import Replica, writes
from emulated.run import EmulatedRun
from kubernetes import config
from kubernetes.dynamic import DynamicClient

LARGE = {"jobs": 5000, "nodes": 1000, "running": 200, "fitting": 30, "steady": 60.0}
QUICK = {"jobs": 200, "nodes": 50, "running": 20, "fitting": 5, "steady": 30.0}
TOKEN_SECONDS = 7200
SETTINGS = Settings(node_monitor_grace_seconds=100_000)
"""Nodes stay Ready without heartbeats."""


def main() -> int:
    """Run the phases; returns 1 where a figure is outside its range."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="200 jobs, no second replica, ranges that hold on any machine"
    )
    parser.add_argument("--jobs", type=int, help="TrainingJobs in all (5000)")
    parser.add_argument("--nodes", type=int, help="(1000)")
    parser.add_argument("--running", type=int, help="jobs that train before the others arrive (200)")
    parser.add_argument("--fitting", type=int, help="jobs that fit, handed in one each second (30)")
    parser.add_argument("--steady", type=float, help="seconds that are watched without changes (60)")
    parser.add_argument(
        "--report-seconds", type=float, default=RENEW_SECONDS, help="between two reports of a trainer"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--logs", type=Path, help="keep the operators' logs here")
    parser.add_argument("--record", type=Path, help="write the JSON here, too")
    given = parser.parse_args()
    for name, value in (QUICK if given.quick else LARGE).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-scale-")))
        logs = given.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        cluster = stack.enter_context(LocalCluster(crds=[write_definitions(folder)], settings=SETTINGS))
        with config.new_client_from_config(str(cluster.kubeconfig)) as api:
            apply_objects(DynamicClient(api), install_objects(OPERATOR_NAMESPACE))
            account = write_operator_kubeconfig(
                api, cluster.kubeconfig, folder / "operator.kubeconfig", token_seconds=TOKEN_SECONDS
            )
        found = asyncio.run(Run(given, cluster.kubeconfig, account, logs).phases())
    if given.record:
        given.record.write_text(json.dumps(found, indent=1) + "\n")
    rows = compare(found["figures"], QUICK_RANGES if given.quick else RANGES)
    if given.output == "json":
        print(json.dumps({**found, "ranges": [row.as_json() for row in rows]}, indent=1))
    else:
        print("\n".join(row.text() for row in rows))
    return 0 if all(row.within is not False for row in rows) else 1


class Run(EmulatedRun):
    """One run of all phases."""

    async def phases(self) -> dict[str, Any]:
        """The figures, with what they were measured on."""
        given = self._given
        began, load = time.monotonic(), os.getloadavg()
        async with (
            Http(self._kubeconfig) as http,
            Http(self._kubeconfig) as apart,
            Http(self._kubeconfig, at_once=100) as fleet_http,
        ):
            self._http, self._apart = http, apart
            await self._objects()
            await self._api_server_limit()
            await self._least_requests()
            fleet = self._fleet = Fleet(fleet_http, report_seconds=given.report_seconds)
            followers = [
                asyncio.create_task(part)
                for part in (self._seen.jobs(fleet_http), self._seen.gangs(fleet_http), fleet.run())
            ]
            try:
                leader = self._start()
                health = asyncio.create_task(leader.watch_health())
                await leader.until("ballast_leader", 1)
                await self._some_run()
                await self._arrivals(leader)
                await self._steady(leader)
                health.cancel()
                self._figures["healthzMaxSeconds"] = max(leader.health_seconds)
                self._figures["operatorRestarts"] = leader.restarts()
                if not given.quick:
                    leader = await self._failover(leader)
                    await self._restart(leader)
            finally:
                for replica in self._all:
                    if replica.process.poll() is None:
                        replica.kill()
                for task in followers:
                    if task.done() and not task.cancelled() and task.exception():
                        self._say(f"stopped: {task.exception()!r}")
                    task.cancel()
        return {
            "figures": {name: round(value, 3) for name, value in self._figures.items()},
            "jobs": given.jobs,
            "nodes": given.nodes,
            "running": given.running,
            "emulated": "nodes, kubelets, trainers",
            "machine": {
                "cores": os.cpu_count(),
                "loadAverageAtStart": load,
                "loadAverageAtEnd": os.getloadavg(),
                "seconds": round(time.monotonic() - began, 1),
            },
        }

    _fleet: Fleet

    async def _api_server_limit(self) -> None:
        """Measure how fast the API server takes TrainingJobs and a status for each, without an operator."""
        items = [objects.waiting_job(index, prefix="limit") for index in range(min(500, self._given.jobs))]
        began, cpu = time.monotonic(), await self._http.cpu_seconds()
        await self._create(items)
        created = time.monotonic()
        await asyncio.gather(*(self._http.send("patch", *objects.some_status(item)) for item in items))
        self._figures |= {
            "apiServerCreatesPerSecond": len(items) / (created - began),
            "apiServerAdmissionsPerSecond": len(items) / (time.monotonic() - began),
            "apiServerAloneCpuSecondsPerThousandJobs": self._per_thousand(
                await self._http.cpu_seconds() - cpu, len(items)
            ),
        }
        await asyncio.gather(
            *(self._http.send("delete", JOB.path("default", item["metadata"]["name"])) for item in items)
        )
        self._seen.created.clear()
        self._say(
            f"API server alone: {self._figures['apiServerAdmissionsPerSecond']:.0f} jobs/s with a status"
        )

    async def _least_requests(self) -> None:
        """Arrivals as below, served with the requests that any operator has to make, and nothing else."""
        waiting, fitting = min(1000, self._given.jobs), min(10, self._given.fitting)
        async with Http(self._kubeconfig, at_once=24) as http, Http(self._kubeconfig) as apart:
            least = LeastRequests(http, apart, fits="least-fits")
            serving = asyncio.create_task(least.run())
            await asyncio.sleep(1)
            arrived, began = await self._arrive(waiting, fitting, prefix="least-")
            await self._until(
                lambda: serving.done() or len(least.told) == waiting + fitting == waiting + len(least.pods),
                "what must be written of all jobs",
            )
            if serving.done():
                serving.result()
            serving.cancel()
            settled = max(least.told.values())
            self._figures |= {
                "leastRequestsAdmissionsPerSecond": waiting / (settled - began),
                "leastRequestsConditionsAfterLastSeconds": max(0.0, settled - arrived),
            }
            seconds = [at - self._seen.created[name] for name, at in least.pods.items()]
            self._percentiles("leastRequestsApplyToPods", seconds)
            await least.clean_up()
        self._seen.created.clear()
        p99 = self._figures["leastRequestsApplyToPodsP99Seconds"]
        self._say(f"with the requests that must be made alone: a pod after {p99:.2f} s (p99)")

    async def _some_run(self) -> None:
        count = self._given.running
        await self._create([objects.fitting_job(index, prefix="runs") for index in range(count)])
        await self._until(lambda: len(self._seen.running) >= count, f"{count} jobs to run")

    async def _arrivals(self, leader: Replica) -> None:
        """All other jobs arrive as fast as the API server takes them; one each second fits."""
        waiting = self._given.jobs - self._given.running - self._given.fitting
        names = [f"fits-{index:05d}" for index in range(self._given.fitting)]
        cpu, server_cpu = leader.cpu_seconds(), await self._http.cpu_seconds()
        written = writes(await leader.metrics())
        arrived, began = await self._arrive(waiting, self._given.fitting)
        self._say(f"{waiting} jobs created at {waiting / (arrived - began):.0f}/s")
        await self._until(
            lambda: len(self._seen.decided.keys() & self._seen.created.keys()) >= len(self._seen.created),
            "conditions of all jobs",
        )
        await self._until(lambda: all(name in self._seen.pods for name in names), "pods of the jobs that fit")
        settled = max(self._seen.decided.values())
        self._figures |= {
            "createsPerSecond": waiting / (arrived - began),
            "admissionsPerSecond": waiting / (settled - began),
            "conditionsAfterLastSeconds": max(0.0, settled - arrived),
            "writesPerArrivedJob": (writes(await leader.metrics()) - written) / (waiting + len(names)),
            "operatorCpuSecondsPerThousandJobs": self._per_thousand(leader.cpu_seconds() - cpu, waiting),
            "apiServerCpuSecondsPerThousandJobs": self._per_thousand(
                await self._http.cpu_seconds() - server_cpu, waiting
            ),
        }
        limit = self._figures["apiServerAdmissionsPerSecond"]
        self._figures["admissionsOverApiServerAlone"] = self._figures["admissionsPerSecond"] / limit
        self._percentiles("applyToPods", [self._seen.pods[n] - self._seen.created[n] for n in names])
        self._decisions(await leader.metrics())

    def _decisions(self, metrics: dict[str, float]) -> None:
        """Figures from the operator's own histogram: its buckets limit the resolution."""
        for part in ("all", "read", "prepare", "solve", "conclude"):
            prefix = 'ballast_decision_seconds_bucket{le="'
            buckets = sorted(
                (float(name.split('"')[1]), value)
                for name, value in metrics.items()
                if name.startswith(prefix) and f'part="{part}"' in name
            )
            total = buckets[-1][1] if buckets else 0
            for label, share in (("P50", 0.5), ("P99", 0.99)):
                limit = next((le for le, count in buckets if total and count >= share * total), None)
                if limit is not None:
                    self._figures[f"decision{part.title()}{label}Seconds"] = limit

    async def _steady(self, leader: Replica) -> None:
        seconds, running = self._given.steady, len(self._seen.running)
        await asyncio.sleep(10)
        before, cpu = await self._writes(leader), leader.cpu_seconds()
        await asyncio.sleep(seconds)
        after, used = await self._writes(leader), leader.cpu_seconds() - cpu
        names = ("operatorWrites", "trainerWrites", "apiServerWrites")
        per_job = [(late - early) / running * 60 / seconds for early, late in zip(before, after, strict=True)]
        self._figures |= {
            "writesPerRunningJobAndMinute": per_job[0] + per_job[1],
            **{f"{name}PerRunningJobAndMinute": count for name, count in zip(names, per_job, strict=True)},
            "steadyCpuSecondsPerMinute": used * 60 / seconds,
        }
        self._figures |= {f"{name}MemoryMiB": size for name, size in leader.memory_mib().items()}
        self._say(f"steady: {sum(per_job[:2]):.1f} writes a minute and job, {running} jobs train")

    async def _writes(self, leader: Replica) -> tuple[float, float, float]:
        """(the operator's, the trainers', all that the API server has answered) so far."""
        return writes(await leader.metrics()), float(self._fleet.renewals), await self._http.writes()

    async def _failover(self, leader: Replica) -> Replica:
        standby = self._start()
        await standby.port()
        await asyncio.sleep(5)
        killed = time.monotonic()
        leader.kill()
        await self._until_served("after-kill")
        self._figures["failoverSeconds"] = self._seen.pods["after-kill-00000"] - killed
        self._say(f"failover: {self._figures['failoverSeconds']:.1f} s until a new job has its pod")
        return standby

    async def _restart(self, leader: Replica) -> None:
        leader.stop()
        fresh = self._start()
        await self._until_served("after-start")
        self._figures["restartToPodsSeconds"] = self._seen.pods["after-start-00000"] - fresh.started
        await self._until_quiet(fresh)
        self._figures["restartToSteadySeconds"] = time.monotonic() - fresh.started - 2.0
        self._say(f"restart: {self._figures['restartToSteadySeconds']:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
