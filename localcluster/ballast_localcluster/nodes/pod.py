"""One pod on a process node, from its binding to the last trace of it."""

import asyncio
import contextlib
import dataclasses
import logging
import shutil
from pathlib import Path

from ballast_localcluster.nodes.api import Api, ApiError, Manifest
from ballast_localcluster.nodes.containers.commands import CommandBuilder
from ballast_localcluster.nodes.containers.process import Command
from ballast_localcluster.nodes.containers.runner import ContainerRunner
from ballast_localcluster.nodes.containers.states import now, pod_status
from ballast_localcluster.nodes.containers.warm_start import WarmStart
from ballast_localcluster.nodes.events import Events
from ballast_localcluster.nodes.node import GPU_RESOURCE, ProcessNode
from ballast_localcluster.nodes.pod_resources.addresses import PodAddresses
from ballast_localcluster.nodes.pod_resources.devices import Devices, NotEnoughDevicesError
from ballast_localcluster.nodes.pod_resources.environment import POD_MARK_VARIABLE
from ballast_localcluster.nodes.pod_resources.references import ConfigurationError, References
from ballast_localcluster.nodes.pod_resources.volumes import Volumes
from ballast_localcluster.supervision.processes import kill_marked

log = logging.getLogger(__name__)

TERMINAL = ("Succeeded", "Failed")
_RETRY_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Context that the pods of a node share."""

    api: Api
    node: ProcessNode
    devices: Devices
    addresses: PodAddresses
    events: Events
    folder: Path
    logs: Path
    address: str
    warm_start: WarmStart | None = None


class Pod:
    """Runs one pod on the node ``host`` and keeps its status true."""

    def __init__(self, manifest: Manifest, host: Host) -> None:
        self.manifest = manifest
        self.metadata: Manifest = manifest["metadata"]
        self.uid: str = self.metadata["uid"]
        self._host = host
        self._folder = host.folder / self.uid
        self.log_folder = host.logs / f"{self.metadata['namespace']}_{self.metadata['name']}_{self.uid}"
        self._start_time = manifest.get("status", {}).get("startTime") or now()
        self._address = ""
        self._forced: dict[str, str] = {}
        self._status: Manifest = {}
        self._gone = False
        self._stopping = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._life: asyncio.Task[None] | None = None
        self._deletion: asyncio.Task[None] | None = None
        spec = manifest["spec"]
        init = spec.get("initContainers") or []
        self.init = [self._runner(container) for container in init]
        self.containers = [self._runner(each, waits_for_init=bool(init)) for each in spec["containers"]]
        self._builder: CommandBuilder | None = None

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.metadata['namespace']}/pods/{self.metadata['name']}"

    @property
    def runners(self) -> list[ContainerRunner]:
        """All containers, in the order they start."""
        return [*self.init, *self.containers]

    def begin(self) -> None:
        """Start to run it; a pod that has ended already only waits for its deletion."""
        self._resume()
        phase = self.manifest.get("status", {}).get("phase")
        if self.metadata.get("deletionTimestamp") or phase in TERMINAL:
            return
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(self._report_fault)

    def delete(self, grace_seconds: float) -> None:
        """The pod is being deleted: end its processes within the grace, then let the object go."""
        if self._deletion is None:
            self._deletion = asyncio.create_task(self._finish())
        self._stop(grace_seconds)

    async def vanish(self) -> None:
        """The object is gone: so are the processes, at once."""
        self._gone = True
        self._host.devices.ends(self.uid)
        self._stop(0)
        await self._ended()

    def power_cut(self) -> None:
        """Kill its processes without any report."""
        self._gone = True
        for runner in self.runners:
            runner.kill()
        if self._life is not None:
            self._life.cancel()

    def _runner(self, container: Manifest, *, waits_for_init: bool = False) -> ContainerRunner:
        name = container["name"]

        async def prepare(run: int) -> Command:
            assert self._builder is not None
            return await self._builder.command(container, run)

        return ContainerRunner(
            container,
            termination_file=self._folder / "containers" / name / "termination-log",
            prepare=prepare,
            changed=self._publish,
            report=lambda kind, reason, message: self._host.events.post(self.manifest, kind, reason, message),
            waits_for_init=waits_for_init,
        )

    def _resume(self) -> None:
        """Continue from the status that an earlier agent wrote, if one ran the pod."""
        status = self.manifest.get("status", {})
        before = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        by_name = {entry["name"]: entry for entry in before}
        for runner in self.runners:
            if runner.name in by_name:
                runner.resume(by_name[runner.name])

    async def _live(self) -> None:
        try:
            given = await self._host.devices.take_when_free(self.manifest)
        except NotEnoughDevicesError as error:
            self._force("OutOf" + GPU_RESOURCE, str(error))
            await self._publish()
            return
        on_host = self.manifest["spec"].get("hostNetwork", False)
        self._address = self._host.address if on_host else self._host.addresses.take()
        refreshing = None
        try:
            volumes = Volumes(
                self._host.api, self.manifest, self._folder / "volumes", self._address, self._host.address
            )
            self._builder = CommandBuilder(
                host_api=self._host.api,
                node=self._host.node,
                pod=self.manifest,
                volumes=volumes,
                devices=given,
                folder=self._folder,
                log_folder=self.log_folder,
                address=self._address,
                host_address=self._host.address,
                warm_start=self._host.warm_start,
            )
            await self._realise(volumes)
            refreshing = asyncio.create_task(volumes.keep_tokens_fresh())
            await self._run_containers()
        finally:
            if refreshing is not None:
                refreshing.cancel()
            kill_marked(f"{POD_MARK_VARIABLE}={self.uid}")
            self._host.devices.give_back(self.uid)
            self._host.addresses.give_back(self._address)

    async def _realise(self, volumes: Volumes) -> None:
        problem = ""
        while not self._stopping.is_set():
            try:
                await volumes.realise(References(self._host.api, self.metadata["namespace"]))
                return
            except ConfigurationError as error:
                if str(error) != problem:
                    problem = str(error)
                    self._host.events.post(self.manifest, "Warning", "FailedMount", problem)
                    await self._publish()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RETRY_SECONDS)

    async def _run_containers(self) -> None:
        spec = self.manifest["spec"]
        policy = spec.get("restartPolicy", "Always")
        deadline = None
        if seconds := spec.get("activeDeadlineSeconds"):
            deadline = asyncio.get_running_loop().call_later(seconds, self._pass_deadline, seconds)
        try:
            for runner in self.init:
                if await runner.run("OnFailure" if policy == "Always" else policy) != 0:
                    return
            await asyncio.gather(*(runner.run(policy) for runner in self.containers))
        finally:
            if deadline is not None:
                deadline.cancel()

    def _pass_deadline(self, seconds: int) -> None:
        self._force(
            "DeadlineExceeded",
            f"Pod was active on the node longer than the specified deadline of {seconds} s",
        )
        self._stop(self.manifest["spec"].get("terminationGracePeriodSeconds", 30))

    def _report_fault(self, life: asyncio.Task[None]) -> None:
        """Report a fault of the agent itself as an Event of the pod."""
        if not life.cancelled() and (fault := life.exception()):
            log.error("pod %s", self._path, exc_info=fault)
            self._host.events.post(self.manifest, "Warning", "NodeAgentFault", repr(fault))

    def _force(self, reason: str, message: str) -> None:
        self._forced = {"phase": "Failed", "reason": reason, "message": message}

    def _stop(self, grace_seconds: float) -> None:
        """SIGTERM the first time, SIGKILL when the shortest grace that was given has passed."""
        if not self._stopping.is_set():
            self._stopping.set()
            for runner in self.runners:
                runner.terminate()
            if any(runner.pid for runner in self.runners) and not self._gone:
                self._host.events.post(self.manifest, "Normal", "Killing", "Stopping the pod's containers")
        asyncio.get_running_loop().call_later(grace_seconds, self._kill)

    def _kill(self) -> None:
        for runner in self.runners:
            runner.kill()

    async def _ended(self) -> None:
        if self._life is not None:
            await asyncio.wait([self._life])
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _finish(self) -> None:
        """Last status after the processes' end, then the object's removal, of exactly this pod."""
        await self._ended()
        if self._life is not None and not self._forced:
            try:
                await self._publish()
            except ApiError as error:  # a status that is refused must not keep the pod from going
                log.warning("last status of %s: %s", self._path, error)
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.uid},
        }
        try:
            await self._host.api.call_until_reached("DELETE", self._path, body)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or another pod of the same name
                raise
        self._gone = True

    async def _publish(self) -> None:
        """Write the status, if it has changed and the pod is still there."""
        async with self._publishing:
            if self._gone:
                return
            status = pod_status(
                init=[runner.view for runner in self.init],
                containers=[runner.view for runner in self.containers],
                address=self._address,
                host_address=self._host.address,
                start_time=self._start_time,
                previous=self._status or self.manifest.get("status", {}),
                forced=self._forced,
            )
            if status == self._status:
                return
            self._status = status
            if status["phase"] in TERMINAL:
                self._host.devices.ends(self.uid)
            # As kubelet does it: conditions merge by type, and the UID guards against a pod of the same name.
            patch = {"metadata": {"uid": self.uid}, "status": status}
            try:
                await self._host.api.patch(self._path + "/status", patch, "strategic-merge")
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
                self._gone = True
