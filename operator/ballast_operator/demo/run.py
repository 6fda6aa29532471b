"""Runs the demo: cluster, operator, policy and jobs up; watch until all is done; everything down again."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from ballast_localcluster import LocalCluster
from ballast_localcluster.default_nodes import default_nodes
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient

from ballast_operator.demo.recorder import Recorder
from ballast_operator.install import install_objects

OPERATOR_NAMESPACE = "ballast-system"
FIELD_MANAGER = "ballast-demo"


class DemoError(RuntimeError):
    """The demo cannot go on; the text says what happened and where the logs are."""


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
    settings: DemoSettings, *, say: Callable[[str], None], on_change: Callable[[Recorder], None]
) -> Recorder:
    """Play the whole story and return the recorder that saw it.

    Args:
        settings: what to run and where.
        say: takes a line about what is being set up.
        on_change: called a few times a second while jobs run, to draw.

    Raises:
        DemoError: the time limit passed, or the operator ended.
    """
    logs = Path(tempfile.mkdtemp(prefix="ballast-demo-"))
    with contextlib.ExitStack() as stack:
        kubeconfig = settings.kubeconfig
        if kubeconfig is None:
            say("starting a Kubernetes control plane on this machine")
            cluster = stack.enter_context(LocalCluster())
            for node in default_nodes():
                cluster.add_node(node)
            kubeconfig = cluster.kubeconfig
        api = config.new_client_from_config(str(kubeconfig))
        kube = DynamicClient(api)
        say("installing Ballast: custom resource definitions, roles")
        apply_objects(kube, install_objects(OPERATOR_NAMESPACE))
        say("starting the operator")
        operator = stack.enter_context(running_operator(kubeconfig, logs / "operator.log"))
        recorder = stack.enter_context(Recorder(api, settings.namespace))
        for path in sorted(settings.manifests.glob("*.yaml")):
            for manifest in yaml.safe_load_all(path.read_text()):
                say(f"kubectl apply -f {path.name}: {manifest['kind']} {manifest['metadata']['name']}")
                apply_objects(kube, [manifest], namespace=settings.namespace)
            _settle(recorder, operator, settings, logs, on_change, done=_all_placed_or_waiting)
        _settle(recorder, operator, settings, logs, on_change, done=_all_finished)
        return recorder


def apply_objects(
    kube: DynamicClient, objects: Sequence[dict[str, Any]], namespace: str | None = None
) -> None:
    """Server-side apply of each object, as ``kubectl apply --server-side`` does.

    A kind that the API server has only just learned is looked up again until it is served.
    """
    for manifest in objects:
        deadline = time.monotonic() + 30.0
        while True:
            try:
                resource = kube.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
                where = manifest["metadata"].get("namespace") or (namespace if resource.namespaced else None)
                resource.server_side_apply(
                    body=manifest, namespace=where, field_manager=FIELD_MANAGER, force_conflicts=True
                )
                break
            except Exception as error:
                served = not isinstance(error, client.ApiException) or error.status in (404, 429, 503)
                if not served or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                kube.resources.invalidate_cache()


@contextlib.contextmanager
def running_operator(kubeconfig: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The operator as a process of its own, as the image runs it; ended with SIGTERM."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ballast_operator.cli", "operator", "--kubeconfig", str(kubeconfig)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "BALLAST_NAMESPACE": OPERATOR_NAMESPACE},
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


def _settle(
    recorder: Recorder,
    operator: subprocess.Popen[bytes],
    settings: DemoSettings,
    logs: Path,
    on_change: Callable[[Recorder], None],
    *,
    done: Callable[[Recorder], bool],
) -> None:
    while True:
        with recorder.lock:
            on_change(recorder)
            finished = done(recorder)
        if finished:
            return
        if operator.poll() is not None:
            raise DemoError(
                f"the operator ended with code {operator.returncode}; its log: {logs}/operator.log"
            )
        if recorder.now > settings.time_limit_seconds:
            raise DemoError(
                f"not finished after {settings.time_limit_seconds:.0f} s; "
                f"the operator's log: {logs}/operator.log"
            )
        time.sleep(0.2)


def _state(job: Any) -> str | None:
    state: str | None = (job.get("status") or {}).get("state")
    return state


def _all_placed_or_waiting(recorder: Recorder) -> bool:
    """Each job either trains (a report has come) or waits; so the next one arrives at a full cluster."""
    return all(
        name in recorder.story.reports or _state(job) in ("Waiting", "Succeeded", "Failed")
        for name, job in recorder.story.job_objects.items()
    )


def _all_finished(recorder: Recorder) -> bool:
    jobs = recorder.story.job_objects
    return bool(jobs) and all(_state(job) in ("Succeeded", "Failed") for job in jobs.values())
