"""Pools and jobs of a live cluster at one moment: for ``ballast top``."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_operator.api.training_job_status import allocation_in
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import JOB, Object, is_ours, key_of, spec_of
from ballast_operator.report.explanation import read_policies, with_nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolLine:
    """A node pool, as the policy in force sees it."""

    pool: str
    gpu_type: str
    nodes: int
    gpus: int
    held: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """A training job. None: not known.

    Attributes:
        gpu_type: of rank 0.
        parts: of a gang in several pools, what it has of each, as text.
        partner: the job that shares its GPU; empty: none.
        reason: the stable word behind its state; empty: no operator has looked at it yet.
    """

    namespace: str
    job: str
    state: str
    gpu_type: str
    gpus: int
    step: int
    total_steps: int
    steps_per_second: float | None
    loss: float | None
    imbalance: float | None
    emulated: bool
    restarts: int
    repacks: int
    cost: float
    why: str
    parts: tuple[str, ...] = ()
    partner: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The cluster at one moment."""

    policies: tuple[str, ...]
    pools: tuple[PoolLine, ...]
    jobs: tuple[JobLine, ...]

    def to_json(self) -> str:
        """A line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


async def read_overview(cluster: Cluster, namespace: str = "") -> Overview:
    """Look once; ``namespace`` empty: all."""
    jobs, _ = await cluster.list(JOB, namespace=namespace)
    return overview(jobs, *await read_policies(cluster))


def overview(jobs: Sequence[Object], policies: Sequence[Object], left_out: str = "") -> Overview:
    """The overview, from objects; ``left_out``: why there are no policies to be seen."""
    pools = [entry for policy in policies for entry in (policy.get("status") or {}).get("capacity") or []]
    return Overview(
        policies=(f"not shown: {left_out}",) if left_out else tuple(map(_policy, policies)),
        pools=tuple(
            PoolLine(
                pool=entry["pool"],
                gpu_type=entry["gpuType"],
                nodes=entry.get("nodes", 0),
                gpus=entry.get("gpus", 0),
                held=entry.get("gpusHeld", 0),
            )
            for entry in pools
        ),
        jobs=tuple(_job(job) for job in sorted(filter(is_ours, jobs), key=key_of)),
    )


def _policy(policy: Object) -> str:
    conditions = {c["type"]: c for c in (policy.get("status") or {}).get("conditions") or []}
    ready = conditions.get("Ready")
    return f"{policy['metadata']['name']}: " + (ready["message"] if ready else "not looked at yet")


def _job(job: Object) -> JobLine:
    status: Any = job.get("status") or {}
    allocation, progress = allocation_in(status), status.get("progress") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    admitted = conditions.get("Admitted") or {}
    placed = admitted.get("status") == "True"
    why = (status.get("lastDecision") or {}).get("why", "") if placed else admitted.get("message", "")
    if placed:
        why = with_nodes(why, conditions.get("Consolidated"))
    return JobLine(
        namespace=job["metadata"].get("namespace", ""),
        job=job["metadata"]["name"],
        state=status.get("state") or "New",
        gpu_type="" if allocation is None else allocation.gpu_type,
        parts=tuple(map(str, allocation.by_pool)) if allocation is not None and allocation.parts else (),
        gpus=0 if allocation is None else allocation.gpus,
        partner="" if allocation is None else allocation.partner,
        step=progress.get("step", 0),
        total_steps=spec_of(job).get("totalSteps", 0),
        steps_per_second=progress.get("stepsPerSecond"),
        loss=progress.get("loss"),
        imbalance=progress.get("imbalance"),
        emulated=progress.get("emulatedSlowdown") is not None,
        restarts=sum((status.get("restarts") or {}).values()),
        repacks=len(status.get("repacks") or []),
        cost=status.get("costSoFar") or 0.0,
        why=why,
        reason=_reason(conditions),
    )


def _reason(conditions: Mapping[str, Any]) -> str:
    """Reason of its end, of its wait, or of why it does not train yet; of a job that trains, of that."""
    for kind in ("Succeeded", "Failed"):
        if conditions.get(kind, {}).get("status") == "True":
            return str(conditions[kind].get("reason", ""))
    admitted, running = conditions.get("Admitted") or {}, conditions.get("Running") or {}
    told = running if admitted.get("status") == "True" and running else admitted
    return str(told.get("reason", ""))
