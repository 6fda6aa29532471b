"""Assignments: what a decision wants of each job, with the reasons that people are told."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Allocation, Job
from ballast_policies.allocation.registry import find_policy
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.protocol.observed import Action
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.memory import HOUR
from ballast_policies.rounds.values import Placement, extra_nodes, kept_ranks
from ballast_policies.scheduling.decision import Decision, isolated_speeds
from ballast_policies.scheduling.refusals import Obstacle, Verdict, each_job
from ballast_policies.scheduling.state import ClusterJob, ClusterState

MOST_CONFIGURATIONS = 3
"""Configurations that an elastic job is told of besides its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Decision for one job, with what carrying it out needs.

    Attributes:
        launches: of the job as it was decided on. A job with a later launch ignores the assignment, so that
            none is carried out twice.
        plan_id: the round.
        placement: for KEEP and PLACE: where; for RELEASE of a dry run: where it would run.
        extra_nodes: for KEEP: nodes of GPUs that the gang may take in addition.
        kept_ranks: for KEEP: the ranks that the gang is to continue with; empty: all.
        reason: for RELEASE: why, in a word; empty otherwise.
        chosen, next_best: what was chosen and what would have been second.
        partner: the job that shares its GPU where it is placed; empty: none.
        may_share: another job may come to share its GPU there.
        memory: bytes of each GPU where it is placed, the least of several pools; None: not known.
        part_speeds, part_memory: of a placement in several pools, relative speed and bytes of a GPU of each
            part (infinite bytes: not known); empty: it is in one.
        isolated_speed: steps/s on its isolated share / steps/s where it runs; 0: not known.
        kept_pods: for KEEP: the pods of the kept ranks; empty: all.
        advice: conditions of the job that the decision alone can know.
        layers: of the job, as measured by it or another of its kind; None: nothing is known.
    """

    action: Action
    launches: int
    plan_id: str = ""
    placement: Placement | None = None
    extra_nodes: tuple[str, ...] = ()
    kept_ranks: tuple[int, ...] = ()
    reason: str = ""
    why: str = ""
    chosen: str = ""
    next_best: str = ""
    partner: str = ""
    may_share: bool = False
    memory: float | None = None
    part_speeds: tuple[float, ...] = ()
    part_memory: tuple[float, ...] = ()
    isolated_speed: float = 0.0
    kept_pods: tuple[str, ...] = ()
    advice: tuple[Verdict, ...] = ()
    layers: MeasuredLayers | None = None


def assign(
    state: ClusterState,
    decision: Decision,
    *,
    advice: Mapping[str, tuple[Verdict, ...]] = MappingProxyType({}),
    layers: Mapping[str, MeasuredLayers | None] = MappingProxyType({}),
) -> dict[str, Assignment]:
    """An assignment for each job of ``state``.

    ``advice``: job -> conditions that the decision sets on it. ``layers``: job -> measured ones.

    Raises:
        JobFaults: jobs for which none can be made.
    """
    speeds = isolated_speeds(state, state.problem, state.running)
    # The fallback is no policy, and reads no prices.
    shares = decision.allocation
    by_price = shares.status != "greedy" and Reads.PRICES in find_policy(shares.policy).reads

    def of(job: ClusterJob) -> Assignment:
        common = {
            "launches": job.launches,
            "plan_id": decision.plan_id,
            "isolated_speed": speeds.get(job.name, 0.0),
            "advice": advice.get(job.name, ()),
            "layers": layers.get(job.name),
            **_sharing(state, job, decision),
            **_gpus_of(state, job, decision.round.placements.get(job.name) or job.placement),
        }
        return _assignment(state, job, decision, by_price=by_price, common=common)

    found = each_job(state.jobs, of, lambda job: job.name)
    return _within_tenant_limits(state, {job.name: one for job, one in zip(state.jobs, found, strict=True)})


def _assignment(
    state: ClusterState, job: ClusterJob, decision: Decision, *, by_price: bool, common: Mapping[str, Any]
) -> Assignment:
    decided, allocation = decision.round, decision.allocation
    placement, why = decided.placements.get(job.name), decided.reasons.get(job.name, "")
    of_data = data_cost_message(job, placement, state.usable_pools, by_price=by_price)
    why = "; ".join(filter(None, (why, of_data, job.left_out)))
    best = _next_best(
        allocation, job.job, state.capacity.gpu_types, chosen=placement.gpu_type if placement else None
    )
    if job.elastic is not None:
        best = _next_best_sizes(job.elastic, allocation.allocation.get(job.name, {}), placement)
    elif job.mixed is not None and not job.mixed.fits_one_pool:
        best = ""  # of one type alone it finds no room
    change = None if placement is None else _change(job, placement)
    if job.placement is not None and (decision.dry_run or change is not None):
        extra, kept = ((), ()) if decision.dry_run or change is None else change
        return Assignment(
            action=Action.KEEP,
            placement=job.placement,
            extra_nodes=extra,
            kept_ranks=kept,
            why=why,
            chosen=str(job.placement),
            next_best=best,
            **common,
        )
    if placement is None:
        # FIFO and AlloX serve some jobs first, others not yet.
        if not any(share > 0 for share in allocation.allocation.get(job.name, {}).values()):
            why = f"{allocation.policy} gives it no GPUs yet; {why}"
        return Assignment(
            action=Action.RELEASE,
            reason=Obstacle.SPOT_LIMIT if job.name in decided.blocked_by_spot_limit else Obstacle.CAPACITY,
            why=why,
            next_best=best,
            **common,
        )
    return Assignment(
        action=Action.RELEASE if decision.dry_run else Action.PLACE,
        placement=placement,
        reason=Obstacle.DRY_RUN if decision.dry_run else "",
        why=f"would get {placement}: {why}" if decision.dry_run else why,
        chosen=str(placement),
        next_best=best,
        **common,
    )


def _change(job: ClusterJob, placement: Placement) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """(nodes of GPUs that a running gang takes, ranks it keeps where it shrinks); None: it moves."""
    held = job.placement
    if held is None or not job.stays(placement):
        return None
    more = extra_nodes(held.nodes, placement.nodes)
    if more is not None:
        return more, ()
    gang = job.mixed if held.parts else job.elastic
    kept = kept_ranks(held.nodes, placement.nodes, gang.together if gang is not None else 1)
    return None if kept is None else ((), tuple(kept))


def _within_tenant_limits(state: ClusterState, found: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Hold back what would exceed a tenant's limit until its shrinking gangs have given GPUs back."""
    left, held_back = dict(state.tenants.left), dict(found)
    for job in state.jobs:
        assignment = found[job.name]
        if job.tenant not in left:
            continue
        starts = assignment.placement if assignment.action is Action.PLACE else None
        wanted = len(assignment.extra_nodes)
        if starts is not None:
            wanted = len(starts.nodes) if job.placement is None else 0
        if wanted <= left[job.tenant]:
            left[job.tenant] -= wanted
            continue
        if starts is None:
            held_back[job.name] = dataclasses.replace(assignment, extra_nodes=())
        elif any(one.tenant == job.tenant and found[one.name].kept_ranks for one in state.jobs):
            why = f"other jobs of namespace {job.tenant}, which is at its limit, are giving GPUs back; then: "
            held_back[job.name] = dataclasses.replace(
                assignment,
                action=Action.RELEASE,
                reason=Obstacle.TENANT_LIMIT,
                why=why + assignment.why,
            )
    return held_back


def _sharing(state: ClusterState, job: ClusterJob, decision: Decision) -> dict[str, Any]:
    """Fields of an assignment about the other job on its GPU."""
    beside, at = decision.round.colocations.get(job.name), decision.round.placements.get(job.name)
    may_share = job.name in state.shared.jobs and bool(state.shared.on(at))
    return {"partner": beside.partner if beside is not None else "", "may_share": may_share}


def _gpus_of(state: ClusterState, job: ClusterJob, placement: Placement | None) -> dict[str, Any]:
    """Fields of an assignment about the memory and the speed of a placement's GPUs."""
    if placement is None:
        return {}
    has = [state.capacity.memory.get(part.pool) for part in placement.by_pool]
    found: dict[str, Any] = {"memory": min((one for one in has if one is not None), default=None)}
    if placement.parts and job.mixed is not None:
        relative = (job.mixed.relative(part.gpu_type) for part in placement.parts)
        found["part_speeds"] = tuple(speed or 1.0 for speed in relative)
        found["part_memory"] = tuple(math.inf if one is None else one for one in has)
    return found


def _next_best(allocation: Allocation, job: Job, gpu_types: tuple[str, ...], *, chosen: str | None) -> str:
    """The type that would have been second, with its speed; empty where there is none."""
    shares = allocation.allocation.get(job.name, {})
    others = [t for t in gpu_types if t != chosen and job.throughput.get(t, 0.0) > 0]
    if not others:
        return ""
    second = max(others, key=lambda t: (shares.get(t, 0.0), job.throughput[t], t))
    return (
        f"{job.gpus} x {second}: {job.throughput[second]:.3g} steps/s, "
        f"share of the time {abs(shares.get(second, 0.0)):.0%}"
    )


def _next_best_sizes(gang: ElasticGang, shares: Mapping[str, float], placement: Placement | None) -> str:
    """The three fastest configurations besides the one that an elastic gang gets, and why not they."""
    kind, gpus = (placement.gpu_type, len(placement.nodes)) if placement is not None else ("", 0)
    now = gang.speed(kind, gpus) if placement is not None else 0.0
    others = [
        (speed, -size, gpu_type)
        for gpu_type, by_size in gang.speeds.items()
        for size, speed in by_size.items()
        if (gpu_type, size) != (kind, gpus)
    ]
    texts = []
    for speed, negative, gpu_type in sorted(others, reverse=True)[:MOST_CONFIGURATIONS]:
        size = -negative
        why = f"share of the time there {abs(shares.get(gpu_type, 0.0)):.0%}"
        if speed <= now:
            why = "no faster"
        elif gpu_type == kind:
            why = f"{size - gpus} GPUs more" if size > gpus else "fewer GPUs"
        texts.append(f"{size} x {gpu_type}: {speed:.3g} steps/s, {why}")
    return "; ".join(texts)


def data_cost_message(
    job: ClusterJob, placement: Placement | None, pools: Sequence[PricedPool], *, by_price: bool
) -> str:
    """Cost of the job's data where it is placed, and a pool not chosen for it; empty: it pays for none.

    ``pools``: with their prices; ``by_price``: whether the policy compares costs.
    """
    if placement is None or not job.usd_per_step:
        return ""
    speed, here = job.speed(placement), placement.mean(job.usd_per_step)
    if speed <= 0:
        return ""
    told = []
    if here > 0:
        told.append(
            f"reading its data from {job.data_region} costs {two_digits(here * speed * HOUR)} an hour"
        )
    prices = {pool.pool: pool.price for pool in pools}
    used = {part.pool for part in placement.by_pool}
    gpus = sum(part.gpus * prices.get(part.pool, 0.0) for part in placement.by_pool) / speed / HOUR
    instead: list[tuple[float, str]] = []
    for pool in pools if by_price and gpus > 0 else ():
        there = _speed_there(job, pool, len(placement.nodes))
        if pool.pool in used | job.closed_pools or pool.price <= 0 or there <= 0:
            continue
        of_gpus = pool.price * len(placement.nodes) / there / HOUR
        of_data = job.usd_per_step.get(pool.pool, 0.0)
        if of_gpus < gpus and of_gpus + of_data > gpus + here:
            hourly = two_digits(of_data * there * HOUR)
            instead.append(
                (
                    of_gpus,
                    f"pool {pool.pool} is cheaper by its GPUs, but it costs {hourly} an hour to "
                    f"read its data there from {job.data_region}",
                )
            )
    return "; ".join([*told, *(text for _, text in sorted(instead)[:1])])


def _speed_there(job: ClusterJob, pool: PricedPool, gpus: int) -> float:
    if pool.gpus < gpus:
        return 0.0
    if job.elastic is not None:
        return job.elastic.speed(pool.gpu_type, gpus)
    return job.job.throughput.get(pool.gpu_type, 0.0)


def two_digits(amount: float) -> str:
    """An amount by two digits, without an exponent: each change of the text is a write."""
    rounded = float(f"{amount:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 else f"{rounded:.10f}".rstrip("0").rstrip(".") or "0"
