"""A trainer pod as a pass sees it."""

import dataclasses
import re

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import (
    LAUNCH_LABEL,
    RANK_LABEL,
    ExitCode,
    ExitReason,
    TerminationMessage,
)

from ballast_operator.api.training_job import NO_FAULTS
from ballast_operator.kube.kinds import Object
from ballast_operator.views.notices import Leaving, deleted, evicted

_OWN_FAULTS = (ExitReason.CONFIGURATION, ExitReason.FAILED)
_SIGKILL = 137
_NOT_KNOWN = 255
"""The exit code that container runtimes give to what ran when they or their node restarted."""
_RESTARTED = "Unknown"
"""containerd's reason with that code (cri/server/restart.go).

CRI-O and Docker have ``Error``, and so has a process that itself exits with 255."""

_BROKEN = frozenset({"CreateContainerConfigError", "InvalidImageName", "ErrImageNeverPull"})
"""Reasons of the kubelet for a container that cannot be made as it is described."""
_NAMES_NOTHING = re.compile(r'code = NotFound|manifest unknown|persistentvolumeclaim ".*" not found')
"""Said of a pod whose image the registry does not have, or whose volume claim is not there.

A registry that cannot be reached, or that asks for a password, may answer in an hour: that does not match."""
_CREATING, _INITIALIZING, _PULLING = "ContainerCreating", "PodInitializing", "PullingImage"
_WAITS_FOR_NAMES = frozenset({"ErrImagePull", "ImagePullBackOff", "Unschedulable"})

USUAL_GRACE_SECONDS = 30
"""Seconds from SIGTERM to SIGKILL unless the template sets them; Kubernetes' default."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of the job.

    Attributes:
        name, uid: which pod.
        launch, rank: from its labels; 0 and -1 where they are missing.
        node: the node it is bound to; empty before.
        address: its IP; empty before it has one.
        phase: Pending, Running, Succeeded, Failed or Unknown; by the trainer's end once it has.
        lingers: it has ended, and another container of the pod, a sidecar, has not.
        leaving: it is being deleted.
        forced: that waits for none of its processes.
        exit_code: of the trainer's container; None while it runs or where it never did.
        message: the trainer's termination message; None where there is none that can be read.
        reason: Kubernetes' reason of an end or a wait (OOMKilled, Evicted, ImagePullBackOff...).
        detail: the same in a sentence.
        disrupted: the cluster ended it (eviction, preemption by a higher priority, taint).
        pulling: all that it waits for is its image, which the node fetches, or an init container that runs.
        node_ready: whether its node is there and Ready.
        leaves: its node is about to go, or the cluster is about to end it: it still runs. One that is
            evicted from a node which is not ready does not: nothing of it can be saved.
        deletion: it is being deleted, and runs until its grace is over; None: it is not, or its node is dead.
        ended_seconds: since this operator first saw that it has ended (own clock); None: it has not.
        grace_seconds: from SIGTERM to SIGKILL when it is deleted.
    """

    name: str
    uid: str
    launch: int
    rank: int
    node: str = ""
    address: str = ""
    phase: str = "Pending"
    lingers: bool = False
    leaving: bool = False
    forced: bool = False
    exit_code: int | None = None
    message: TerminationMessage | None = None
    reason: str = ""
    detail: str = ""
    disrupted: bool = False
    pulling: bool = False
    node_ready: bool = True
    leaves: Leaving | None = None
    deletion: Leaving | None = None
    ended_seconds: float | None = dataclasses.field(default=None, compare=False)
    grace_seconds: int = USUAL_GRACE_SECONDS

    @property
    def alive(self) -> bool:
        """It holds, or may come to hold, its GPU."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def ready_for_plan(self) -> bool:
        """It runs and has an address."""
        return self.phase == "Running" and bool(self.address) and not self.leaving

    @property
    def at_fault(self) -> bool:
        """It failed because of the user's model, data, configuration or memory."""
        if self.phase != "Failed" or self.disrupted:
            return False
        if self.reason == "OOMKilled":
            return True
        if self.message is not None and self.message.reason in _OWN_FAULTS:
            return True
        if self.exit_code is None or self.reason == _RESTARTED:
            return False
        # CRI-O has -1 where it does not know the code. The kubelet has SIGKILL's for one that is gone.
        return self.exit_code not in (*NO_FAULTS, _SIGKILL, -1)

    @property
    def broken(self) -> bool:
        """It has not run, and cannot until somebody changes the job or makes what it names."""
        if self.phase != "Pending":
            return False
        missing = self.reason in _WAITS_FOR_NAMES and _NAMES_NOTHING.search(self.detail) is not None
        return missing or self.reason in _BROKEN

    @property
    def creating(self) -> bool:
        """Its node prepares its volumes and network, or pulls its image: kubelet does not tell them apart."""
        return self.phase == "Pending" and self.reason == _CREATING

    def while_pulling(self) -> "PodView":
        """The pod while its node pulls its image, if its containers are being made."""
        return dataclasses.replace(self, pulling=True, reason=_PULLING, detail="") if self.creating else self

    @property
    def lost_peer(self) -> bool:
        """It ended because another did."""
        return self.phase == "Failed" and self.exit_code == ExitCode.PEER_LOST


LONGEST_DETAIL = 300
"""Characters of a container's own message that are shown."""
EVICTION_REASONS = frozenset({"Evicted", "NodeLost", "NodeShutdown", "Preempting", "Terminated"})
"""Values of ``status.reason`` of pods that the cluster has ended."""


def read_pod(
    item: Object, *, node_ready: bool, leaving: Leaving | None = None, restarted: bool = False
) -> PodView:
    """A pod from its JSON; ``leaving``: its node is; ``restarted``: its node was, while the pod ran."""
    metadata, content, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels = metadata.get("labels") or {}
    of, state = _container_state(content, status)
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    reason, detail = _reason(status, ended, waiting, conditions.get("PodScheduled", {}))
    if restarted and ended.get("exitCode") == _NOT_KNOWN:
        reason = _RESTARTED
    # Volumes and network are there, and nothing has failed. Many kubelets set this condition only after the
    # pull: there the Event ``Pulling`` tells.
    prepared = conditions.get("PodReadyToStartContainers", {}).get("status") == "True"
    pulling = waiting.get("reason") == _INITIALIZING
    if prepared and waiting.get("reason") == _CREATING:
        pulling, reason, detail = True, _PULLING, ""
    message = _message(ended.get("message", ""))
    if message is None:
        # What a container that did not end by itself printed last has nothing to do with it.
        unseen = "its node or the container runtime there restarted" if reason == _RESTARTED else ""
        detail = unseen or detail or _last_line(ended.get("message", ""))
    detail = ": ".join(filter(None, (of, detail)))
    phase, lingers = status.get("phase", "Pending"), False
    if phase == "Running" and "exitCode" in ended:
        # Native sidecars are not among these: the kubelet ends them.
        states = _states(status, "containerStatuses").values()
        lingers = not all("terminated" in each for each in states)
        # That it evicts the pod the kubelet says with the phase, a moment after the last container's end.
        explained = message is not None and message.reason in _OWN_FAULTS
        if lingers or explained or not ended["exitCode"]:
            phase = "Failed" if ended["exitCode"] else "Succeeded"
    target = conditions.get("DisruptionTarget", {})
    grace = content.get("terminationGracePeriodSeconds")
    disrupted, alive = target.get("status") == "True", phase not in ("Succeeded", "Failed")
    if leaving is None and disrupted and node_ready:
        leaving = evicted(metadata.get("deletionTimestamp"), target.get("reason", ""))
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        launch=_number(labels.get(LAUNCH_LABEL), 0),
        rank=_number(labels.get(RANK_LABEL), -1),
        node=content.get("nodeName", ""),
        address=status.get("podIP", ""),
        phase=phase,
        lingers=lingers,
        leaving=bool(metadata.get("deletionTimestamp")),
        forced=metadata.get("deletionGracePeriodSeconds") == 0,
        exit_code=ended.get("exitCode"),
        message=message,
        reason=reason,
        detail=detail,
        disrupted=disrupted or status.get("reason") in EVICTION_REASONS,
        pulling=pulling,
        node_ready=node_ready,
        leaves=leaving if alive else None,
        deletion=deleted(metadata.get("deletionTimestamp")) if alive and node_ready else None,
        grace_seconds=USUAL_GRACE_SECONDS if grace is None else int(grace),
    )


def _container_state(content: Object, status: Object) -> tuple[str, Object]:
    """(which init container, state) of the one that runs, waits or has failed; else of the trainer's own.

    The trainer's is the first of the pod. Until they are done the kubelet says of all containers that the pod
    initializes, also while the image of one is pulled.
    """
    name = (content.get("containers") or [{}])[0].get("name", "")
    trainer = _states(status, "containerStatuses").get(name, {})
    if (trainer.get("waiting") or {}).get("reason") != _INITIALIZING:
        return "", trainer
    own = content.get("initContainers") or []
    sidecars = {each.get("name") for each in own if each.get("restartPolicy") == "Always"}
    for name, state in _states(status, "initContainerStatuses").items():
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if ended.get("exitCode") or waiting.get("reason", _INITIALIZING) != _INITIALIZING:
            return f"init container {name}", state
        if "running" in state and name not in sidecars:
            return f"init container {name} runs", trainer
    return "", {"waiting": {"reason": _CREATING}}


def _states(status: Object, part: str) -> dict[str, Object]:
    """Name -> state of the containers, in the kubelet's order."""
    return {entry.get("name", ""): entry.get("state") or {} for entry in status.get(part) or []}


def _reason(status: Object, ended: Object, waiting: Object, scheduled: Object) -> tuple[str, str]:
    """(reason, detail) of the pod's end or wait: its own, its container's, or the scheduler's."""
    reason = status.get("reason") or ended.get("reason") or waiting.get("reason") or ""
    if not reason and scheduled.get("status") == "False":
        return scheduled.get("reason", ""), scheduled.get("message", "")
    return reason, (status.get("message") or waiting.get("message") or "").rstrip()


def _last_line(text: str) -> str:
    """Last line of a container's message, or of its log's end; a traceback's has the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LONGEST_DETAIL] if lines else ""


def _number(text: str | None, default: int) -> int:
    """A label as a number; the operator writes at most ten digits."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,10}", text) else default


def _message(text: str) -> TerminationMessage | None:
    try:
        return TerminationMessage.from_json(text)
    except ContractError:
        return None
