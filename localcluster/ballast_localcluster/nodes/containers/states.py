"""States of containers, and the pod's status that follows from them: values in, a dict out.

Phases and conditions are kubelet's: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ballast_localcluster.nodes.api import Manifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Not running, and not done: ``reason`` in one word, ``message`` for people."""

    reason: str
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Its process runs; ``started_at`` is an RFC 3339 time."""

    started_at: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """Its process has ended."""

    exit_code: int
    reason: str
    message: str = ""
    started_at: str = ""
    finished_at: str = ""
    container_id: str = ""


_REPLACE = {"$patch": "replace"}
"""In a list of a strategic merge patch: the list as given, not merged with what an agent before wrote."""

State = Waiting | Running | Terminated


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContainerView:
    """One container of a pod, as its status shows it.

    Attributes:
        name, image: from the pod's spec.
        state: now.
        last_state: how its process ended last, once it was restarted.
        restarts: how often it was.
        container_id: of the process that runs or ran last; empty before the first.
        will_restart: a terminated container that the restart policy starts again.
    """

    name: str
    image: str
    state: State
    last_state: Terminated | None = None
    restarts: int = 0
    container_id: str = ""
    will_restart: bool = False


def now() -> str:
    """This moment, as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod_phase(init: list[ContainerView], containers: list[ContainerView]) -> str:
    """Pending, Running, Succeeded or Failed."""
    for view in init:
        if isinstance(view.state, Terminated) and not view.will_restart:
            if view.state.exit_code != 0:
                return "Failed"
        else:
            return "Pending"
    final = [
        view.state for view in containers if isinstance(view.state, Terminated) and not view.will_restart
    ]
    if len(final) == len(containers):
        return "Succeeded" if all(state.exit_code == 0 for state in final) else "Failed"
    if all(isinstance(v.state, Waiting) and v.last_state is None for v in containers):
        return "Pending"
    return "Running"


def pod_status(
    *,
    init: list[ContainerView],
    containers: list[ContainerView],
    address: str,
    host_address: str,
    start_time: str,
    previous: Manifest,
    forced: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """The pod's status, but for what others write (PodScheduled).

    ``start_time``: when the node took it. ``previous``: the status built before, for the times at which
    conditions changed. ``forced``: phase, reason and message, by decision of the node (deadline, admission).
    """
    phase = forced.get("phase") or pod_phase(init, containers)
    return {
        "phase": phase,
        "reason": forced.get("reason") or None,
        "message": forced.get("message") or None,
        "hostIP": host_address,
        "hostIPs": [_REPLACE, {"ip": host_address}],
        **({"podIP": address, "podIPs": [_REPLACE, {"ip": address}]} if address else {}),
        "startTime": start_time,
        "conditions": [
            _initialized(init, previous),
            *_readiness(phase, containers, previous),
        ],
        "initContainerStatuses": [_container_status(view, init=True) for view in init],
        "containerStatuses": [_container_status(view, init=False) for view in containers],
    }


def _initialized(init: list[ContainerView], previous: Manifest) -> Manifest:
    incomplete = [view.name for view in init if not _succeeded(view)]
    why = {
        "reason": "ContainersNotInitialized",
        "message": f"containers with incomplete status: [{' '.join(incomplete)}]",
    }
    return _condition("Initialized", not incomplete, why, previous)


def _readiness(phase: str, containers: list[ContainerView], previous: Manifest) -> list[Manifest]:
    """The conditions ContainersReady and Ready, which are the same without readiness gates."""
    not_ready = [view.name for view in containers if not isinstance(view.state, Running)]
    if phase == "Succeeded":
        why = {"reason": "PodCompleted"}
    else:
        why = {
            "reason": "ContainersNotReady",
            "message": f"containers with unready status: [{' '.join(not_ready)}]",
        }
    ready = phase not in ("Succeeded", "Failed") and not not_ready
    return [_condition(kind, ready, why, previous) for kind in ("ContainersReady", "Ready")]


def _condition(kind: str, holds: bool, why: dict[str, str], previous: Manifest) -> Manifest:
    """A condition with the time of its last transition; ``why`` is shown where it does not hold."""
    status = "True" if holds else "False"
    before = next((c for c in previous.get("conditions", []) if c["type"] == kind), None)
    since = before["lastTransitionTime"] if before and before["status"] == status else now()
    return {
        "type": kind,
        "status": status,
        "lastTransitionTime": since,
        "reason": None,
        "message": None,
        **({} if holds else why),
    }


def _succeeded(view: ContainerView) -> bool:
    return isinstance(view.state, Terminated) and view.state.exit_code == 0


def _container_status(view: ContainerView, *, init: bool) -> Manifest:
    return {
        "name": view.name,
        "image": view.image,
        "imageID": "",
        "containerID": view.container_id,
        "ready": _succeeded(view) if init else isinstance(view.state, Running),
        "started": isinstance(view.state, Running),
        "restartCount": view.restarts,
        "state": _state(view.state),
        "lastState": _state(view.last_state) if view.last_state else {},
    }


def _state(state: State) -> dict[str, Any]:
    match state:
        case Waiting():
            return {"waiting": {"reason": state.reason, "message": state.message}}
        case Running():
            return {"running": {"startedAt": state.started_at}}
        case Terminated():
            return {
                "terminated": {
                    "exitCode": state.exit_code,
                    "reason": state.reason,
                    "message": state.message,
                    "startedAt": state.started_at or None,
                    "finishedAt": state.finished_at or None,
                    "containerID": state.container_id,
                }
            }
