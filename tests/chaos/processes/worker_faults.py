"""What can go wrong with nodes, pods, trainers and their checkpoints."""

import contextlib
import os
import resource
import signal
from typing import Any

from ballast_policies.contract.messages import lease_name

from tests.chaos.processes.cluster import NAMESPACE, NODES
from tests.chaos.processes.episode import Episode
from tests.chaos.processes.kinds import CORE, kind, node_of, seconds_of
from tests.operator.loops.hostile.test_lies import LIES

TAINT = {"key": "maintenance", "value": "chaos", "effect": "NoSchedule"}


@kind("node agent killed")
def _(episode: Episode, number: int) -> None:
    episode.cluster.kill(episode.cluster.agent(node_of(number)))


@kind("node agent stopped")
def _(episode: Episode, number: int) -> None:
    """Up to long enough for the node to be NotReady and its pods to be evicted."""
    episode.stop_for(episode.cluster.agent(node_of(number)), seconds_of(number, 30))


@kind("node flaps")
def _(episode: Episode, number: int) -> None:
    agent = episode.cluster.agent(node_of(number))
    episode.cluster.kill(agent)
    episode.later(4.0, lambda: episode.cluster.kill(agent))


@kind("node deleted")
def _(episode: Episode, number: int) -> None:
    name = node_of(number)
    episode.cluster.call("DELETE", f"/api/v1/nodes/{name}")
    episode.later(seconds_of(number, 8), lambda: episode.register(name))


@kind("node cordoned")
def _(episode: Episode, number: int) -> None:
    _change_node(episode, number, {"spec": {"unschedulable": True}}, {"spec": {"unschedulable": None}})


@kind("node relabelled")
def _(episode: Episode, number: int) -> None:
    back = {"metadata": {"labels": {"ballast.dev/pool": NODES[node_of(number)][0]}}}
    _change_node(episode, number, {"metadata": {"labels": {"ballast.dev/pool": "another"}}}, back)


@kind("node tainted")
def _(episode: Episode, number: int) -> None:
    path = f"/api/v1/nodes/{node_of(number)}"
    taints = [*episode.cluster.call("GET", path)["spec"].get("taints", []), TAINT]
    episode.cluster.merge(path, {"spec": {"taints": taints}})
    episode.later(seconds_of(number, 12), lambda: episode.insist(lambda: _remove_taint(episode, path)))


def _remove_taint(episode: Episode, path: str) -> None:
    node = episode.cluster.call("GET", path)
    taints = [taint for taint in node["spec"].get("taints", []) if taint["key"] != TAINT["key"]]
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    episode.cluster.merge(path, {"metadata": version, "spec": {"taints": taints}})


def _change_node(episode: Episode, number: int, patch: dict[str, Any], back: dict[str, Any]) -> None:
    path = f"/api/v1/nodes/{node_of(number)}"
    episode.cluster.merge(path, patch)
    undo = lambda: episode.insist(lambda: episode.cluster.merge(path, back))  # noqa: E731
    episode.later(seconds_of(number, 12), undo)


@kind("pod deleted by someone")
def _(episode: Episode, number: int) -> None:
    if pod := episode.pod(number):
        episode.cluster.call("DELETE", f"{CORE}/pods/{pod}")


@kind("pod evicted")
def _(episode: Episode, number: int) -> None:
    if pod := episode.pod(number):
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        episode.cluster.call("POST", f"{CORE}/pods/{pod}/eviction", body)


@kind("trainer killed")
def _(episode: Episode, number: int) -> None:
    """As the kernel does where memory is short: exit code 137."""
    if pid := episode.rank(number):
        episode.cluster.signal_process(pid, signal.SIGKILL)


@kind("trainer told to end")
def _(episode: Episode, number: int) -> None:
    if pid := episode.rank(number):
        episode.cluster.signal_process(pid, signal.SIGTERM)


@kind("trainer hangs")
def _(episode: Episode, number: int) -> None:
    """Longer than its peers and the operator wait, or shorter."""
    if pid := episode.rank(number):
        episode.stop_process_for(pid, seconds_of(number, 40))


@kind("disk full")
def _(episode: Episode, number: int) -> None:
    """Files of more than 8 kB cannot be written by one rank."""
    pid = episode.rank(number)
    if pid and pid in episode.cluster.own_processes():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (8_192, resource.RLIM_INFINITY))
            episode.later(seconds_of(number, 10), lambda: _unlimited(pid))


def _unlimited(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@kind("checkpoint storage away")
def _(episode: Episode, number: int) -> None:
    """The folder of a job is a file for a while: nothing can be read or written there."""
    job = episode.job(number)
    away = job.checkpoints.with_name(job.name + ".away")
    if not job.checkpoints.is_dir() or away.exists():
        return
    os.rename(job.checkpoints, away)  # noqa: PTH104 - at once
    job.checkpoints.write_text("no folder")

    def back() -> None:
        job.checkpoints.unlink(missing_ok=True)
        os.rename(away, job.checkpoints)  # noqa: PTH104

    episode.later(seconds_of(number, 10), back)


for name, (annotation, text) in LIES.items():
    if name == "an epoch of the future":
        continue  # a true acknowledgement never follows it: the liar's own job restarts by time-outs

    @kind(f"trainer says {name}")
    def _(episode: Episode, number: int, annotation: str = annotation, text: str = text) -> None:
        patch = {"metadata": {"annotations": {annotation: text}}}
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/"
        episode.cluster.merge(path + lease_name(episode.job(number).name), patch)
