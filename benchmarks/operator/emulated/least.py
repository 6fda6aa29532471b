"""The requests that any operator has to make, and no others: what they take on this machine.

One status for a job that waits; for one that fits a status, a service account and a pod, one after the other
where one needs the other. No decision, no Lease, no plan, no role.
"""

import asyncio
import time
from typing import Any

from ballast_operator.kube.kinds import JOB, POD, SERVICE_ACCOUNT

from emulated import objects
from emulated.http import Http


class LeastRequests:
    """Serves the jobs that a watch brings.

    Args:
        http: for the statuses of jobs that wait.
        apart: for jobs that fit, whose requests never queue behind those.
        fits: prefix of their names.

    Attributes:
        told: job -> when its status was written, on the monotonic clock.
        pods: job -> when its pod was made.
    """

    def __init__(self, http: Http, apart: Http, *, fits: str) -> None:
        self._http = http
        self._apart = apart
        self._fits = fits
        self.told: dict[str, float] = {}
        self.pods: dict[str, float] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for _, event, item in self._http.watch(JOB):
                if event == "ADDED":
                    tasks.create_task(self._serve(item))

    async def _serve(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        status = objects.some_status(item)
        if not name.startswith(self._fits):
            await self._http.send("patch", *status)
            self.told[name] = time.monotonic()
            return
        account = SERVICE_ACCOUNT.path("default"), objects.account(name)
        await asyncio.gather(self._apart.send("patch", *status), self._apart.send("post", *account))
        self.told[name] = time.monotonic()
        await self._apart.send("post", POD.path("default"), objects.pod(name))
        self.pods[name] = time.monotonic()

    async def clean_up(self) -> None:
        """Delete the jobs and pods that were served; accounts are left."""
        pods = (self._http.send("delete", POD.path("default", f"{name}-0"), _NOW) for name in self.pods)
        jobs = (self._http.send("delete", JOB.path("default", name)) for name in self.told)
        await asyncio.gather(*pods, *jobs)


_NOW = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
