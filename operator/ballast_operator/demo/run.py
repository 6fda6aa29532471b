"""The run of the demo: start of cluster, operator, policy and jobs, wait for their end, removal."""

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ballast.client.connection import missing
from kubernetes import config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ForbiddenError, NotFoundError

from ballast_operator.api.conditions import JobState
from ballast_operator.demo.report import demo_manifests
from ballast_operator.demo.story import Recorder
from ballast_operator.kube.kinds import NAMESPACE
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


def run_demo(
    *,
    kubeconfig: Path | None = None,
    namespace: str = "default",
    time_limit_seconds: float = 300.0,
    announce: Callable[[str], None],
    on_change: Callable[[Recorder], None],
) -> Recorder:
    """Run the demo and return its recorder.

    ``kubeconfig`` None: a cluster is started on this machine and removed afterwards. The time limit is from
    the first job to the last one's end. ``announce`` gets a line of text for each step of the setup;
    ``on_change`` is called a few times a second while jobs run, to draw.

    Raises:
        DemoError: the time limit passed, or the operator ended.
    """
    started_here = kubeconfig is None
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(_folder_of_logs())
        checkpoints = Path("/var/tmp") / f"ballast-demo-{secrets.token_hex(4)}"
        mark = None
        if kubeconfig is None:
            # An optional package, which a demo on an existing cluster does not need.
            from ballast_localcluster import LocalCluster
            from ballast_localcluster.nodes.node import default_nodes

            announce("starting a Kubernetes control plane and process nodes on this machine")
            crds = write_definitions(logs)
            cluster = stack.enter_context(LocalCluster(nodes=default_nodes(), crds=[crds]))
            kubeconfig, mark = cluster.kubeconfig, cluster.mark
            checkpoints = logs / "checkpoints"
        api = config.new_client_from_config(str(kubeconfig))
        kube = DynamicClient(api, cache_file=str(logs / "discovery.json"))
        if started_here:
            apply_objects(kube, [NAMESPACE.object(metadata={"name": namespace})])
        else:
            _require_namespace(kube, namespace)
        announce("installing Ballast: custom resource definitions, roles, the operator's own account")
        apply_objects(kube, install_objects(OPERATOR_NAMESPACE))
        announce("starting the operator")
        operator_kubeconfig = write_operator_kubeconfig(api, kubeconfig, logs / "operator.kubeconfig")
        operator = stack.enter_context(
            running_operator(operator_kubeconfig, logs / "operator.log", mark=mark)
        )
        made: list[dict[str, Any]] = []
        if not started_here:
            stack.callback(_remove, kube, made, namespace, announce)
        recorder = stack.enter_context(Recorder(api, namespace))

        def wait_until(done: Callable[[Recorder], bool]) -> None:
            while True:
                with recorder.lock:
                    on_change(recorder)
                    finished = done(recorder)
                if finished:
                    return
                log = f"the operator's log: {logs}/operator.log"
                if operator.poll() is not None:
                    raise DemoError(f"the operator ended with code {operator.returncode}; {log}")
                if recorder.now > time_limit_seconds:
                    raise DemoError(f"not finished after {time_limit_seconds:.0f} s; {log}")
                time.sleep(0.2)

        for path in sorted(demo_manifests().glob("*.yaml")):
            for manifest in yaml.safe_load_all(path.read_text()):
                keep_checkpoints_in(manifest, checkpoints)
                announce(f"kubectl apply -f {path.name}: {manifest['kind']} {manifest['metadata']['name']}")
                made.append(manifest)
                apply_objects(kube, [manifest], namespace=namespace)
                if manifest["kind"] == "TrainingJob":  # the next one arrives at a cluster in use
                    wait_until(functools.partial(_placed_or_waiting, name=manifest["metadata"]["name"]))
        wait_until(_all_finished)
        return recorder


@contextlib.contextmanager
def _folder_of_logs() -> Iterator[Path]:
    """A folder that stays only where a ``DemoError`` names a log in it."""
    folder, kept = Path(tempfile.mkdtemp(prefix="ballast-demo-")), False
    try:
        yield folder
    except DemoError:
        kept = any(folder.iterdir())
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(
    kube: DynamicClient, made: Sequence[dict[str, Any]], namespace: str, announce: Callable[[str], None]
) -> None:
    """However the demo ends: nobody looks after its jobs any more, and their pods hold GPUs."""
    announce("removing the demo's jobs and policy; definitions and roles stay")
    delete_objects(kube, made, namespace)


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
def running_operator(
    kubeconfig: Path, log: Path, *options: str, mark: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The operator as a separate process, with the command of its image; ended with SIGTERM."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*operator_command(kubeconfig), *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(mark or {})},
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


def _placed_or_waiting(recorder: Recorder, name: str) -> bool:
    """Whether the allocator has decided on the job: it holds GPUs, or its status has the reason to wait."""
    status = (recorder.story.job_objects.get(name) or {}).get("status") or {}
    waits = status.get("state") == JobState.WAITING and status.get("lastDecision") is not None
    return waits or status.get("allocation") is not None or status.get("state") in ENDED


def _all_finished(recorder: Recorder) -> bool:
    jobs = recorder.story.job_objects
    return bool(jobs) and all((job.get("status") or {}).get("state") in ENDED for job in jobs.values())
