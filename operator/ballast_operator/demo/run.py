"""The run of the demo: start of cluster, operator, policy and jobs, wait for their end, removal."""

import contextlib
import dataclasses
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from kubernetes import config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ForbiddenError, NotFoundError

from ballast_operator.api.conditions import JobState
from ballast_operator.demo.manifests import read_manifests
from ballast_operator.demo.story import Recorder
from ballast_operator.kube.client import missing
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    delete_objects,
    install_objects,
    operator_command,
    write_definitions,
    write_operator_kubeconfig,
)

ENDED = (JobState.SUCCEEDED, JobState.FAILED)


class DemoError(RuntimeError):
    """The demo cannot continue; the text gives the reason and the place of the logs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """How to run the demo.

    Attributes:
        kubeconfig: a cluster to use; None starts one on this machine and removes it afterwards.
        manifests: ClusterPolicy and TrainingJobs, in the order of their file names.
        time_limit_seconds: from the first job to the last one's end.
        namespace: where the jobs live.
    """

    kubeconfig: Path | None = None
    manifests: Path
    time_limit_seconds: float = 300.0
    namespace: str = "default"


def run_demo(
    settings: DemoSettings, *, announce: Callable[[str], None], on_change: Callable[[Recorder], None]
) -> Recorder:
    """Run the demo and return its recorder.

    ``announce`` gets a line of text for each step of the setup; ``on_change`` is called a few times a second
    while jobs run, to draw.

    Raises:
        DemoError: the time limit passed, or the operator ended.
    """
    logs = Path(tempfile.mkdtemp(prefix="ballast-demo-"))
    with contextlib.ExitStack() as stack:
        kubeconfig = settings.kubeconfig
        checkpoints = Path("/var/tmp") / f"ballast-demo-{secrets.token_hex(4)}"
        if kubeconfig is None:
            # An optional package, which a demo on an existing cluster does not need.
            from ballast_localcluster import LocalCluster
            from ballast_localcluster.nodes.node import default_nodes

            announce("starting a Kubernetes control plane and process nodes on this machine")
            crds = write_definitions(logs)
            cluster = stack.enter_context(LocalCluster(nodes=default_nodes(), crds=[crds]))
            kubeconfig = cluster.kubeconfig
            checkpoints = logs / "checkpoints"
        api = config.new_client_from_config(str(kubeconfig))
        kube = DynamicClient(api)
        if settings.kubeconfig is None:
            apply_objects(kube, [_namespace(settings.namespace)])
        else:
            _require_namespace(kube, settings.namespace)
        announce("installing Ballast: custom resource definitions, roles, the operator's own account")
        apply_objects(kube, install_objects(OPERATOR_NAMESPACE))
        announce("starting the operator")
        operator_kubeconfig = write_operator_kubeconfig(api, kubeconfig, logs / "operator.kubeconfig")
        operator = stack.enter_context(running_operator(operator_kubeconfig, logs / "operator.log"))
        recorder = stack.enter_context(Recorder(api, settings.namespace))
        watching = _Watching(recorder, operator, settings.time_limit_seconds, logs, on_change)
        for path in sorted(settings.manifests.glob("*.yaml")):
            for manifest in yaml.safe_load_all(path.read_text()):
                keep_checkpoints_in(manifest, checkpoints)
                announce(f"kubectl apply -f {path.name}: {manifest['kind']} {manifest['metadata']['name']}")
                apply_objects(kube, [manifest], namespace=settings.namespace)
                watching.until_applied(manifest)
        watching.until(_all_finished)
        if settings.kubeconfig is not None:
            announce("removing the demo's jobs and policy; definitions and roles stay")
            delete_objects(kube, read_manifests(settings.manifests), settings.namespace)
        shutil.rmtree(logs, ignore_errors=True)
        return recorder


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _require_namespace(kube: DynamicClient, name: str) -> None:
    try:
        kube.resources.get(api_version="v1", kind="Namespace").get(name=name)
    except NotFoundError as error:
        raise DemoError(missing(name)) from error
    except ForbiddenError:
        return  # not allowed to check; creating the jobs will show it


def keep_checkpoints_in(manifest: dict[str, Any], folder: Path) -> None:
    """Point a job's hostPath volumes at a folder of this run, so that no run resumes from another's state."""
    if manifest["kind"] != "TrainingJob":
        return
    for volume in manifest["spec"]["template"]["spec"].get("volumes", []):
        if "hostPath" in volume:
            volume["hostPath"]["path"] = str(folder / manifest["metadata"]["name"])


@contextlib.contextmanager
def running_operator(kubeconfig: Path, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The operator as a separate process, with the command of its image; ended with SIGTERM."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*operator_command(kubeconfig), *options],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Watching:
    """Waits for conditions on the story while it draws the view; raises at the time limit."""

    def __init__(
        self,
        recorder: Recorder,
        operator: subprocess.Popen[bytes],
        limit_seconds: float,
        logs: Path,
        on_change: Callable[[Recorder], None],
    ) -> None:
        self._recorder = recorder
        self._operator = operator
        self._limit_seconds = limit_seconds
        self._logs = logs
        self._on_change = on_change

    def until_applied(self, manifest: dict[str, Any]) -> None:
        """Until the job holds GPUs or waits for some; so the next one arrives at a cluster in use."""
        if manifest["kind"] == "TrainingJob":
            name = manifest["metadata"]["name"]
            self.until(lambda recorder: _placed_or_waiting(recorder, name))

    def until(self, done: Callable[[Recorder], bool]) -> None:
        """Wait until ``done`` returns true.

        Raises:
            DemoError: the operator ended, or the time limit passed.
        """
        while True:
            with self._recorder.lock:
                self._on_change(self._recorder)
                finished = done(self._recorder)
            if finished:
                return
            log = f"the operator's log: {self._logs}/operator.log"
            if self._operator.poll() is not None:
                raise DemoError(f"the operator ended with code {self._operator.returncode}; {log}")
            if self._recorder.now > self._limit_seconds:
                raise DemoError(f"not finished after {self._limit_seconds:.0f} s; {log}")
            time.sleep(0.2)


def _state(job: Any) -> str | None:
    state: str | None = (job.get("status") or {}).get("state")
    return state


def _placed_or_waiting(recorder: Recorder, name: str) -> bool:
    """Whether the allocator has decided on the job: it holds GPUs, or its status has the reason to wait."""
    status = (recorder.story.job_objects.get(name) or {}).get("status") or {}
    waits = status.get("state") == JobState.WAITING and status.get("lastDecision") is not None
    return waits or status.get("allocation") is not None or status.get("state") in ENDED


def _all_finished(recorder: Recorder) -> bool:
    jobs = recorder.story.job_objects
    return bool(jobs) and all(_state(job) in ENDED for job in jobs.values())
