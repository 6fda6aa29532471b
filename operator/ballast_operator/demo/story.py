"""The story of a demo: events of the cluster, in the order of the API server.

The recorder feeds it watch events; the live view and the summary read it.  It does not
depend on the operator, only on the API.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import GPU_RESOURCE, JOB_LABEL, REPORT_ANNOTATION, Report
from kubernetes import client, watch

POOL_LABEL = "ballast.dev/pool"
"""Label of nodes: the name of their pool. Written with the nodes; read for display only."""

TERMINAL_PHASES = ("Succeeded", "Failed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """A pod at one moment."""

    name: str
    uid: str
    job: str
    node: str | None
    gpus: int
    phase: str
    container_restarts: int
    created: float
    deleted: float | None = None

    @property
    def holds_gpus(self) -> bool:
        """Bound to a node, neither finished nor gone: kube-scheduler counts its GPUs as taken."""
        return self.node is not None and self.phase not in TERMINAL_PHASES and self.deleted is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportSeen:
    """A trainer's report and when it was seen, in seconds since the story began."""

    at: float
    report: Report


@dataclasses.dataclass(slots=True, kw_only=True)
class Story:
    """Everything seen so far; times are seconds since the story began.

    Attributes:
        node_gpus: node name -> allocatable GPUs.
        node_pools: node name -> pool label, for the view.
        pods: pod UID -> its last state (deleted ones stay, with the time).
        job_objects: job name -> the last TrainingJob object.
        job_states: job name -> [(time, state)], one entry for each change.
        reports: job name -> reports in order.
        narration: (time, text) of the events to show.
        max_gpus_over_capacity: over all nodes and moments, GPUs held less GPUs that exist.
    """

    node_gpus: dict[str, int] = dataclasses.field(default_factory=dict)
    node_pools: dict[str, str] = dataclasses.field(default_factory=dict)
    pods: dict[str, PodSeen] = dataclasses.field(default_factory=dict)
    job_objects: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    job_states: dict[str, list[tuple[float, str]]] = dataclasses.field(default_factory=dict)
    reports: dict[str, list[ReportSeen]] = dataclasses.field(default_factory=dict)
    narration: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    max_gpus_over_capacity: int | None = None
    _told_why: set[str] = dataclasses.field(default_factory=set)

    def see_node(self, node: Mapping[str, Any]) -> None:
        """Take in a Node object."""
        name = node["metadata"]["name"]
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        self.node_gpus[name] = int(allocatable.get(GPU_RESOURCE, 0))
        self.node_pools[name] = (node["metadata"].get("labels") or {}).get(POOL_LABEL, "")

    def see_pod(self, at: float, pod: Mapping[str, Any], *, deleted: bool) -> None:
        """Take in a Pod object of a watch event."""
        metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
        before = self.pods.get(metadata["uid"])
        containers = status.get("containerStatuses") or []
        self.pods[metadata["uid"]] = PodSeen(
            name=metadata["name"],
            uid=metadata["uid"],
            job=(metadata.get("labels") or {}).get(JOB_LABEL, ""),
            node=spec.get("nodeName"),
            gpus=sum(_gpus(container) for container in spec["containers"]),
            phase=status.get("phase", "Pending"),
            container_restarts=sum(int(c.get("restartCount", 0)) for c in containers),
            created=before.created if before else at,
            deleted=at if deleted else None,
        )
        self._count_gpus()

    def see_job(self, at: float, job: Mapping[str, Any], *, deleted: bool = False) -> None:
        """Take in a TrainingJob object; changes of its state become narration. It stays when deleted."""
        if deleted:
            return
        name = job["metadata"]["name"]
        self.job_objects[name] = job
        state = (job.get("status") or {}).get("state") or "New"
        states = self.job_states.setdefault(name, [])
        if not states or states[-1][1] != state:
            states.append((at, state))
            self.narration.append((at, f"{name}: {state}{_gpus_given(job)}"))
        # The reason for a wait is written shortly after the wait begins.
        why = ((job.get("status") or {}).get("lastDecision") or {}).get("why")
        if state == "Waiting" and why and name not in self._told_why:
            self._told_why.add(name)
            self.narration.append((at, f"{name}: {why}"))

    def see_lease(self, at: float, lease: Mapping[str, Any], *, deleted: bool = False) -> None:
        """Take in the Lease that a job's rank 0 renews."""
        if deleted:
            return
        name = lease["metadata"]["name"]
        text = (lease["metadata"].get("annotations") or {}).get(REPORT_ANNOTATION)
        if text is None:
            return
        try:
            report = Report.from_json(text)
        except ContractError as error:
            self.narration.append((at, f"{name}: unreadable report: {error}"))
            return
        seen = self.reports.setdefault(name, [])
        if seen and seen[-1].report == report:
            return
        previous = seen[-1].report.rebalances if seen else 0
        seen.append(ReportSeen(at=at, report=report))
        if report.rebalances > previous:
            self.narration.append((at, f"{name}: {_rebalance_words(report)}"))

    def pods_of(self, job: str) -> list[PodSeen]:
        """Pods that the job ever had, oldest first."""
        return sorted((p for p in self.pods.values() if p.job == job), key=lambda p: (p.created, p.name))

    def pool_gpus(self) -> dict[str, int]:
        """Pool -> GPUs of its nodes."""
        gpus: dict[str, int] = {}
        for node, pool in self.node_pools.items():
            gpus[pool] = gpus.get(pool, 0) + self.node_gpus[node]
        return gpus

    def gpus_held(self) -> dict[str, int]:
        """Node name -> GPUs held now."""
        held = dict.fromkeys(self.node_gpus, 0)
        for pod in self.pods.values():
            if pod.holds_gpus and pod.node is not None:
                held[pod.node] = held.get(pod.node, 0) + pod.gpus
        return held

    def _count_gpus(self) -> None:
        over = max(
            (held - self.node_gpus.get(node, 0) for node, held in self.gpus_held().items()), default=None
        )
        if over is not None and (self.max_gpus_over_capacity is None or over > self.max_gpus_over_capacity):
            self.max_gpus_over_capacity = over


def _gpus(container: Mapping[str, Any]) -> int:
    resources = container.get("resources") or {}
    return int({**(resources.get("requests") or {}), **(resources.get("limits") or {})}.get(GPU_RESOURCE, 0))


def _gpus_given(job: Mapping[str, Any]) -> str:
    allocation = (job.get("status") or {}).get("allocation") or {}
    return f" on {allocation['gpus']} x {allocation['gpuType']}" if allocation.get("gpus") else ""


def _rebalance_words(report: Report) -> str:
    words = "moved layers between ranks while training"
    if report.imbalance_before is not None and report.imbalance_after is not None:
        words += f": imbalance {report.imbalance_before:.0%} -> {report.imbalance_after:.0%}"
    if report.rebalance_pause_ms is not None:
        words += f", training stood still for {report.rebalance_pause_ms:.0f} ms"
    return words


WATCH_SECONDS = 300
"""Seconds after which the API server ends a watch; it is opened again at once."""


class Recorder:
    """Follows one namespace within it; read its ``story`` under its ``lock``."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.story = Story()
        self.lock = threading.Lock()
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._coordination = client.CoordinationV1Api(api)
        self._api = api
        self._namespace = namespace
        self._began = time.monotonic()
        self._stopped = threading.Event()

    @property
    def now(self) -> float:
        """Seconds since the recorder was made."""
        return time.monotonic() - self._began

    def __enter__(self) -> "Recorder":
        for node in self._core.list_node().items:
            self.story.see_node(self._api.sanitize_for_serialization(node))
        self._follow(self._core.list_namespaced_pod, self.story.see_pod, label_selector=JOB_LABEL)
        self._follow(self._coordination.list_namespaced_lease, self.story.see_lease)
        jobs = {"group": "ballast.dev", "version": "v1alpha1", "plural": "trainingjobs"}
        self._follow(self._custom.list_namespaced_custom_object, self.story.see_job, **jobs)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()

    def _follow(self, lister: Callable[..., Any], see: Callable[..., None], **where: str) -> None:
        def loop() -> None:
            while not self._stopped.is_set():
                try:
                    for event in watch.Watch().stream(
                        lister, namespace=self._namespace, timeout_seconds=WATCH_SECONDS, **where
                    ):
                        with self.lock:
                            item = self._api.sanitize_for_serialization(event["object"])
                            see(self.now, item, deleted=event["type"] == "DELETED")
                        if self._stopped.is_set():
                            return
                except Exception as error:  # the API server restarts, a watch breaks: note it, list again
                    if self._stopped.is_set():
                        return
                    with self.lock:
                        self.story.narration.append((self.now, f"watch broke ({error}); opening it again"))
                    self._stopped.wait(1.0)

        threading.Thread(target=loop, daemon=True, name=f"watch-{see.__name__}").start()
