"""States of containers, and the pod's status that follows from them: values in, a dict out.

Phases and conditions are kubelet's: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from types import MappingProxyType

from ballast_localcluster.nodes.api import Manifest

_REPLACE = {"$patch": "replace"}
"""Directive in a list of a strategic merge patch: the list as given, not merged with an earlier agent's."""

State = Mapping[str, Manifest]
"""``waiting``, ``running`` or ``terminated`` -> its fields, as a pod's status has them."""


def waiting(reason: str, message: str = "") -> State:
    """Not running, and not done: ``reason`` in one word, ``message`` for people."""
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, reason: str, message: str = "", *, since: str | None, container: str = "") -> State:
    """Its process has ended now; ``since``: when it started, None: it did not; ``container``: its id."""
    finished = None if since is None else now()
    ended = {"exitCode": code, "reason": reason, "message": message, "containerID": container}
    return {"terminated": {**ended, "startedAt": since, "finishedAt": finished}}


def exit_code(state: State) -> int | None:
    """Exit code of its process; None: it has not ended."""
    ended = state.get("terminated")
    return None if ended is None else int(ended["exitCode"])


@dataclasses.dataclass(slots=True, kw_only=True)
class ContainerView:
    """One container of a pod, as its status shows it.

    Attributes:
        name, image: from the pod's spec.
        state: now.
        last_state: how its process ended last, once it was restarted; else empty.
        restarts: how often it was.
        container_id: of the process that runs or ran last; empty before the first.
        will_restart: a terminated container that the restart policy starts again.
    """

    name: str
    image: str
    state: State
    last_state: State = dataclasses.field(default_factory=dict)
    restarts: int = 0
    container_id: str = ""
    will_restart: bool = False

    @property
    def ended(self) -> int | None:
        """Its exit code, if it is not started again; None: it runs, or will."""
        return None if self.will_restart else exit_code(self.state)


def now() -> str:
    """This moment, as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod_phase(init: list[ContainerView], containers: list[ContainerView]) -> str:
    """Pending, Running, Succeeded or Failed."""
    for view in init:
        if view.ended is None:
            return "Pending"
        if view.ended:
            return "Failed"
    codes = [view.ended for view in containers]
    if None not in codes:
        return "Failed" if any(codes) else "Succeeded"
    if all("waiting" in view.state and not view.last_state for view in containers):
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
    incomplete = [view.name for view in init if exit_code(view.state) != 0]
    why = {
        "reason": "ContainersNotInitialized",
        "message": f"containers with incomplete status: [{' '.join(incomplete)}]",
    }
    return _condition("Initialized", not incomplete, why, previous)


def _readiness(phase: str, containers: list[ContainerView], previous: Manifest) -> list[Manifest]:
    """The conditions ContainersReady and Ready, which are the same without readiness gates."""
    not_ready = [view.name for view in containers if "running" not in view.state]
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


def _container_status(view: ContainerView, *, init: bool) -> Manifest:
    runs = "running" in view.state
    return {
        "name": view.name,
        "image": view.image,
        "imageID": "",
        "containerID": view.container_id,
        "ready": exit_code(view.state) == 0 if init else runs,
        "started": runs,
        "restartCount": view.restarts,
        "state": dict(view.state),
        "lastState": dict(view.last_state),
    }
