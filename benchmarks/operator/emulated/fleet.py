"""Stand-ins for kubelets and trainers: pods run as soon as they are bound, rank 0 answers and reports.

Nothing is executed. As with KWOK, Nodes and Pods are objects whose status is written by one program.
"""

import asyncio
import datetime
import itertools
from typing import Any

from ballast_operator.kube.kinds import CONFIG_MAP, LEASE, POD
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    JOB_LABEL,
    PLAN_KEY,
    REPORT_ANNOTATION,
    Ack,
    ExitCode,
    Report,
    lease_name,
)
from ballast_policies.contract.plan import Directive, Plan

from emulated.http import Http


class Fleet:
    """All nodes' kubelets and all jobs' rank 0.

    Args:
        http: of the administrator.
        report_seconds: between two reports of a job.

    Attributes:
        plans: the newest plan of each job.
        renewals: how often a trainer has written its Lease.
    """

    def __init__(self, http: Http, *, report_seconds: float) -> None:
        self._http = http
        self._report_seconds = report_seconds
        self._addresses = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._steps = itertools.count(1)
        self._started: set[str] = set()
        self.plans: dict[tuple[str, str], Plan] = {}
        self.renewals = 0

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kubelets())
            group.create_task(self._ranks())
            group.create_task(self._reports())

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kubelets(self) -> None:
        async for _, event, pod in self._http.watch(POD):
            metadata = pod["metadata"]
            if event == "DELETED" or JOB_LABEL not in (metadata.get("labels") or {}):
                continue
            path = POD.path(metadata["namespace"], metadata["name"])
            if metadata.get("deletionTimestamp"):
                self._spawn(self._quiet("delete", path, {"gracePeriodSeconds": 0}))
            elif pod["spec"].get("nodeName") and metadata["uid"] not in self._started:
                self._started.add(metadata["uid"])
                number = next(self._addresses)
                status = {
                    "phase": "Running",
                    "podIP": f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
                    "conditions": [{"type": "Ready", "status": "True"}],
                }
                self._spawn(self._quiet("patch", f"{path}/status", {"status": status}))

    async def _ranks(self) -> None:
        async for _, event, item in self._http.watch(CONFIG_MAP, query=f"&labelSelector={JOB_LABEL}"):
            metadata = item["metadata"]
            key = (metadata["namespace"], metadata["labels"][JOB_LABEL])
            if event == "DELETED":
                self.plans.pop(key, None)
                continue
            plan = Plan.from_json(item["data"][PLAN_KEY])
            known = self.plans.get(key)
            self.plans[key] = plan
            if known is None or known.epoch != plan.epoch:
                self._spawn(self._follow(key, plan))

    async def _follow(self, key: tuple[str, str], plan: Plan) -> None:
        await self._tell(key, plan, acknowledge=True)
        if plan.directive is not Directive.CHECKPOINT_AND_STOP:
            return
        self.plans.pop(key, None)
        for rank in plan.ranks:
            path = POD.path(key[0], rank.pod) + "/status"
            state = {"terminated": {"exitCode": int(ExitCode.STOPPED)}}
            status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]}
            await self._quiet("patch", path, {"status": status})

    async def _reports(self) -> None:
        """Every job once in ``report_seconds``, evenly."""
        while True:
            keys = list(self.plans)
            for key in keys:
                plan = self.plans.get(key)
                if plan is not None:
                    self._spawn(self._tell(key, plan, acknowledge=False))
                await asyncio.sleep(self._report_seconds / len(keys))
            if not keys:
                await asyncio.sleep(0.5)

    async def _tell(self, key: tuple[str, str], plan: Plan, *, acknowledge: bool) -> None:
        step = next(self._steps)
        report = Report(epoch=plan.epoch, step=step, loss=1.0, steps_per_second=0.4)
        notes = {REPORT_ANNOTATION: report.to_json()}
        if acknowledge:
            notes[ACK_ANNOTATION] = Ack(epoch=plan.epoch, step=step, checkpoint_step=step).to_json()
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = {"metadata": {"annotations": notes}, "spec": {"holderIdentity": "rank-0", "renewTime": now}}
        await self._quiet("patch", LEASE.path(key[0], lease_name(key[1])), body)
        self.renewals += 1

    async def _quiet(self, verb: str, path: str, body: Any) -> None:
        try:
            await self._http.send(verb, path, body)
        except RuntimeError as error:  # the object went away meanwhile
            if ": 404 " not in str(error) and ": 409 " not in str(error):
                raise
