"""The run of the demo: start of cluster, operator, policy and jobs, wait for their end, removal."""

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from ballast.client.connection import missing
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ForbiddenError, NotFoundError

from ballast_operator.api.conditions import JobState
from ballast_operator.demo.report import demo_manifests
from ballast_operator.demo.story import Recorder
from ballast_operator.kube.kinds import NAMESPACE
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    api_client,
    apply_objects,
    delete_objects,
    install_objects,
    operator_command,
    write_definitions,
    write_operator_kubeconfig,
)

if TYPE_CHECKING:
    from ballast_localcluster import LocalCluster

_LIBRARIES = ("/usr", "/lib", "/lib64")
ENDED = (JobState.SUCCEEDED, JobState.FAILED)


class DemoError(RuntimeError):
    """The demo cannot continue; the text gives the reason and the place of the logs."""


def run_demo(
    *,
    kubeconfig: Path | None = None,
    real_nodes: bool = False,
    namespace: str = "default",
    time_limit_seconds: float = 600.0,
    announce: Callable[[str], None],
    on_change: Callable[[Recorder], None],
) -> Recorder:
    """Run the demo and return its recorder.

    ``kubeconfig`` None: a cluster is started on this machine and removed afterwards, of process nodes or,
    with ``real_nodes``, of kubelets and containers. The time limit is from the first job to the last one's
    end. ``announce`` gets a line of text for each step of the setup; ``on_change`` is called a few times a
    second while jobs run, to draw.

    Raises:
        DemoError: no cluster can be started here, the time limit passed, or the operator ended.
    """
    started_here = kubeconfig is None
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(_folder_of_logs())
        checkpoints = Path("/var/tmp") / f"ballast-demo-{secrets.token_hex(4)}"
        mark = None
        if kubeconfig is None:
            cluster = _start_cluster(stack, logs, announce, real_nodes=real_nodes)
            kubeconfig, mark = cluster.kubeconfig, cluster.mark
            checkpoints = logs / "checkpoints"
        api = api_client(kubeconfig)
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
                if real_nodes:
                    _run_this_environment(manifest)
                announce(f"kubectl apply -f {path.name}: {manifest['kind']} {manifest['metadata']['name']}")
                made.append(manifest)
                apply_objects(kube, [manifest], namespace=namespace)
                if manifest["kind"] == "TrainingJob":  # the next one arrives at a cluster in use
                    wait_until(functools.partial(_placed_or_waiting, name=manifest["metadata"]["name"]))
        wait_until(_all_finished)
        return recorder


def _start_cluster(
    stack: contextlib.ExitStack, logs: Path, announce: Callable[[str], None], *, real_nodes: bool
) -> "LocalCluster":
    # An optional package, which a demo on an existing cluster does not need.
    from ballast_localcluster import LocalCluster
    from ballast_localcluster.errors import LocalClusterError
    from ballast_localcluster.kubelets.start import RealNodes
    from ballast_localcluster.nodes.node import default_nodes

    kind = "real" if real_nodes else "process"
    announce(f"starting a Kubernetes control plane and {kind} nodes on this machine")
    kubelets = RealNodes(progress=announce) if real_nodes else None
    cluster = LocalCluster(nodes=default_nodes(), crds=[write_definitions(logs)], real_nodes=kubelets)
    try:
        return stack.enter_context(cluster)
    except (LocalClusterError, TimeoutError) as error:
        raise DemoError(str(error)) from error


@contextlib.contextmanager
def _folder_of_logs() -> Iterator[Path]:
    """A folder that stays only where a ``DemoError`` names a log in it."""
    folder, kept = Path(tempfile.mkdtemp(prefix="ballast-demo-")), False
    try:
        yield folder
    except DemoError as error:
        kept = str(folder) in str(error)
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


def _run_this_environment(manifest: dict[str, Any]) -> None:
    """Let a job's container run this Python and its packages, read-only from this machine's folders.

    Nodes of this machine reach no registry. As root: a user's folders may be closed to others.
    """
    from ballast_localcluster.kubelets.configuration import PAUSE

    if manifest["kind"] != "TrainingJob":
        return
    spec = manifest["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    container |= {"image": PAUSE, "command": [sys.executable, "-m", "ballast_trainer", "pod"]}
    container["securityContext"] = {"runAsUser": 0}
    # The first of sys.path is the command's own folder, or the current one.
    needed = {Path(path) for path in (*_LIBRARIES, sys.prefix, sys.base_prefix, *sys.path[1:])}
    folders = [path for path in sorted(needed) if path.is_dir() and needed.isdisjoint(path.parents)]
    for number, path in enumerate(folders):
        name = f"machine-{number}"
        spec["volumes"].append({"name": name, "hostPath": {"path": str(path)}})
        container["volumeMounts"].append({"name": name, "mountPath": str(path), "readOnly": True})
    spec["volumes"].append({"name": "tmp", "emptyDir": {}})
    container["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})


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
    """True if the allocator has decided on the job: it holds GPUs, or its status has the reason to wait."""
    status = (recorder.story.job_objects.get(name) or {}).get("status") or {}
    waits = status.get("state") == JobState.WAITING and status.get("lastDecision") is not None
    return waits or status.get("allocation") is not None or status.get("state") in ENDED


def _all_finished(recorder: Recorder) -> bool:
    jobs = recorder.story.job_objects
    return bool(jobs) and all((job.get("status") or {}).get("state") in ENDED for job in jobs.values())
