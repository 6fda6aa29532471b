"""The cluster at one moment, as the values that policies decide on.

Jobs that the ClusterPolicy's tenant limits keep out take no part, and are told why.
"""

import dataclasses
import datetime
import functools
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from ballast_policies.allocation.problem import Job
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import OBJECT
from ballast_policies.protocol.observed import Cause
from ballast_policies.rounds.divisions import mixtures
from ballast_policies.rounds.gangs import (
    PAUSE_SECONDS,
    RESTART_SECONDS,
    ElasticGang,
    MixedGang,
    SharedGpus,
    SharingJob,
)
from ballast_policies.rounds.memory import resize_cooldown_seconds
from ballast_policies.rounds.values import Node, NodeRequest
from ballast_policies.scheduling.gang_room import gigabytes, known_over_planned, within_limit
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.measurements import Measurements
from ballast_policies.scheduling.refusals import JobFaults, each_job
from ballast_policies.scheduling.state import ClusterJob, ClusterState
from ballast_policies.throughput.estimator import PairSpeeds
from ballast_policies.throughput.speeds import Estimate, Speeds

from ballast_operator.allocator.costs.bill import BudgetLeft, without_suspended_teams
from ballast_operator.allocator.costs.data_prices import data_prices, usd_per_step, usd_to_move
from ballast_operator.allocator.problem.admission import (
    Admissions,
    Admitted,
    FaultyJob,
    RefusedJob,
    admit_tenants,
)
from ballast_operator.allocator.problem.capacity import ClusterCapacity, read_capacity, spot_limits
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.api.conditions import JobCondition, some_of
from ballast_operator.api.node_pool import SharesGpu
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.observation.findings import AvoidedNode
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView, closed_by_condition
from ballast_operator.views.spec import JobSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(ClusterState):
    """The cluster at one moment, with those who take no part in decisions.

    Attributes:
        admitted: the jobs that policies see, as the operator does.
        refused: jobs that want GPUs and cannot be placed by this policy.
        budgets: of the teams that have one.
        faulty: those that are left out since deciding on them raises.
        sick_nodes: nodes that are closed or avoided by ``spec.nodeHealth``, or have lost GPUs, as text.
    """

    capacity: ClusterCapacity
    admitted: tuple[Admitted, ...] = ()
    refused: tuple[RefusedJob, ...] = ()
    budgets: Mapping[str, BudgetLeft] = dataclasses.field(default_factory=dict)
    faulty: tuple[FaultyJob, ...] = ()
    sick_nodes: tuple[str, ...] = ()

    @functools.cached_property
    def by_name(self) -> Mapping[str, ClusterJob]:
        """Job name -> job."""
        return {job.name: job for job in self.jobs}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cluster as it is seen at one moment.

    Attributes:
        pods: of others.
        stuck: pods of jobs that were to have ended a while ago.
        status: of the ClusterPolicy, as an operator has left it.
        regions: pool -> where its nodes were.
        avoided: node -> why all jobs avoid it.
    """

    now: Time
    nodes: Mapping[str, NodeView]
    pods: Sequence[Object]
    jobs: Sequence[JobView]
    status: Object | None = None
    regions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    avoided: Mapping[str, AvoidedNode] = dataclasses.field(default_factory=dict)
    stuck: Sequence[Object] = ()


def take_snapshot(
    spec: ClusterPolicySpec,
    seen: Observed,
    measurements: Measurements,
    admissions: Admissions | None = None,
    *,
    budgets: Mapping[str, BudgetLeft] = MappingProxyType({}),
    left_out: Mapping[Key, Exception] | None = None,
) -> Snapshot:
    """Input of a decision under ``spec``, without the jobs for which that raises.

    ``measurements``: of trainers. ``admissions``: of earlier snapshots. ``budgets``: of teams. ``left_out``:
    jobs that are known to be at fault, with their errors.
    """
    admissions, out = admissions or Admissions(), dict(left_out or {})
    while True:
        try:
            return _take(spec, seen, measurements, admissions, budgets, out)
        except JobFaults as faults:
            if faults.by_job.keys() <= out.keys():
                raise
            out |= faults.by_job


def _take(
    spec: ClusterPolicySpec,
    seen: Observed,
    measurements: Measurements,
    admissions: Admissions,
    budgets: Mapping[str, BudgetLeft],
    left_out: Mapping[Key, Exception],
) -> Snapshot:
    now = seen.now
    at_fault = [view for view in seen.jobs if view.key in left_out]
    jobs = [view for view in seen.jobs if view.key not in left_out]
    wants = each_job(jobs, lambda view: wants_gpus(view, now), lambda view: view.key)
    wanting, over = without_suspended_teams(list(itertools.compress(jobs, wants)), budgets)
    nodes = closed_by_condition(seen.nodes, spec.node_health.unhealthy_conditions)
    healthy = dataclasses.replace(seen, nodes=nodes)
    capacity = read_capacity(spec, healthy, jobs=jobs, wanting=wanting, left_out=at_fault)
    _leave_out_partners(jobs, left_out, capacity.left_out.keys() & capacity.shared.keys())
    capacity = dataclasses.replace(capacity, data_prices=data_prices(spec.data_prices))
    admitted, refused = admissions.admit(spec, capacity, wanting, measurements.profiles)
    admitted, beyond, rooms = admit_tenants(spec.tenants, admitted, seen.jobs, spec.objective.entities)
    shared = colocation_candidates(admitted, capacity, measurements.kinds)
    found = cluster_jobs(admitted, measurements, capacity, shared, now)
    running = {job.name: job.placement for job in found if job.placement is not None}
    if speeds_there := shared.colocated_speeds(running):
        found = tuple(dataclasses.replace(job, beside_speed=speeds_there.get(job.name, 1.0)) for job in found)
    return Snapshot(
        capacity=capacity,
        jobs=found,
        admitted=tuple(admitted),
        refused=(*refused, *over, *beyond),
        tenants=rooms,
        budgets=budgets,
        shared=shared,
        spot=spot_limits(spec, capacity.kinds),
        sick_nodes=(
            *(f"node {node.name} is {said}" for node in capacity.nodes if (said := _sick(node, nodes, seen))),
            *capacity.shrunk,
        ),
        faulty=tuple(FaultyJob(view=view, error=left_out[view.key]) for view in at_fault),
    )


def _sick(node: Node, nodes: Mapping[str, NodeView], seen: Observed) -> str:
    """Reason that the node is closed or avoided for its health, as text; empty: it is not."""
    if node.name in nodes and (why := nodes[node.name].closed) != seen.nodes[node.name].closed:
        return why
    return str(seen.avoided.get(node.name, ""))


def _leave_out_partners(jobs: Sequence[JobView], left_out: Mapping[Key, Exception], nodes: Set[str]) -> None:
    """A GPU of which one job is left out stays as it is: so is the job that shares it."""
    beside: dict[Key, Exception] = {
        view.key: RuntimeError("it shares a GPU with one of " + some_of(["/".join(key) for key in left_out]))
        for view in jobs
        if nodes and (held := view.running_allocation) is not None and not nodes.isdisjoint(held.nodes)
    }
    if beside:
        raise JobFaults(beside)


def wants_gpus(view: JobView, now: Time) -> bool:
    """True if the job takes part in the allocation."""
    status = view.status
    if view.deleting or view.spec is None or status.finished:
        return False
    if view.finished_step is not None and status.allocation is not None:
        return False
    if view.blocked is not None and status.allocation is None:
        return False
    if view.hold(now) is not None or (status.next_launch_at is not None and status.next_launch_at > now):
        return False
    return (
        status.allocation is None
        or status.allocation.ending is None
        or status.allocation.ending.cause is not Cause.COMPLETED
    )


def colocation_candidates(
    jobs: Sequence[Admitted], capacity: ClusterCapacity, kinds: Mapping[str, Speeds]
) -> SharedGpus:
    """Jobs that may share the pools' GPUs; ``kinds``: kind of training -> speeds alone and in pairs."""
    if not capacity.shared:
        return SharedGpus()
    found, stated = {}, dict[str, dict[str, float]]()
    for one in jobs:
        memory = needed_memory(one)
        if one.spec.asked.shares_gpu is SharesGpu.ALLOWED and not why_alone(one) and memory is not None:
            kind = one.spec.kind
            said = {gpu_type: by_size[1] for gpu_type, by_size in one.spec.throughput.items() if 1 in by_size}
            stated.setdefault(kind, said)
            at = [key.alone_in_pool for key in kinds.get(kind, {}) if key.nodes == 1]
            known = {gang[0] for gang in at if gang is not None and gang[1] == 1}
            found[job_id(one.view.key)] = SharingJob(
                kind=kind, memory=memory, known_alone=frozenset(known | stated[kind].keys())
            )
    return SharedGpus(jobs=found, memory=capacity.shared, speeds=PairSpeeds.of(kinds, stated))


def needed_memory(one: Admitted) -> float | None:
    """Bytes that it needs of its GPU: as stated, else as measured; None: not known."""
    if one.spec.memory_per_gpu is not None:
        return one.spec.memory_per_gpu
    if one.memory.need is None:
        return None
    return one.memory.need.least(one.spec.positions(1)) or None


def why_alone(one: Admitted) -> str:
    """Reason that a job that allows it does not share a GPU, as text; empty: it may."""
    spec, allocation = one.spec, one.view.running_allocation
    if spec.smallest_gang != 1 or spec.largest_gang != 1:
        sizes = f"{spec.smallest_gang} to {spec.largest_gang} GPUs"
        return (
            f"it may have {sizes}, and jobs of exactly one share. To fix: pipeline.minStages and maxStages: 1"
        )
    if needed_memory(one) is None:
        return "what memory it needs is neither stated nor measured yet. To fix: set memoryPerGpu"
    if allocation is not None and allocation.shared_gpu is None:
        return "it was launched on a GPU of its own"
    return ""


def sharing_text(one: Admitted, shared: SharedGpus) -> str:
    """Reason that a job runs alone although it allows sharing; empty: it does not allow it, or may share."""
    if one.spec.asked.shares_gpu is SharesGpu.NEVER:
        return ""
    if not shared.memory:
        return "sharesGpu: no pool has a node whose GPU two jobs may share"
    why = why_alone(one)
    if why:
        return f"sharesGpu: {why}"
    memory, most = needed_memory(one) or 0.0, max(shared.memory.values())
    if memory >= most:
        known = f"the largest has {gigabytes(most)}" if most else "their memory is not known"
        return f"sharesGpu: it needs {gigabytes(memory)} of GPUs that are shared, and {known}"
    if not shared.jobs[job_id(one.view.key)].known_alone:
        return "sharesGpu: it shares once its speed alone is reported, or stated in throughput"
    return ""


def cluster_job(
    one: Admitted,
    speeds: Mapping[str, Estimate],
    measurements: Measurements,
    capacity: ClusterCapacity,
    now: Time,
    alone: str,
) -> ClusterJob:
    """The job as decisions see it; ``alone``: why it does not share a GPU, as text; empty: nothing to say."""
    view, known = one.view, {gpu_type: speeds[gpu_type] for gpu_type in one.gpu_types}
    rates = {gpu_type: speed.steps_per_second for gpu_type, speed in known.items()}
    allocation = view.running_allocation
    held, packed = view.held_placement, rates
    at = held.placement if held is not None and not held.parts else None
    per_pod = one.spec.gpus_per_pod if allocation is None else allocation.gpus_per_pod
    degrees = None if allocation is None else allocation.degrees
    of_one_size = len(one.sizes) == 1 and one.mixed is None
    elastic, grows_from = None, None if of_one_size else may_grow_from(view)
    may_grow = grows_from is not None and grows_from <= now
    if len(one.sizes) > 1:
        by_size = sizes_that_fit(one, measurements.by_size(one, known, one.sizes), capacity)
        if by_size:
            if held is not None:
                packed = {t: sizes[held.gpus] for t, sizes in by_size.items() if held.gpus in sizes}
            from_here: dict[str, Mapping[int, float]] = {**by_size}
            if at is not None:
                free = sum(capacity.idle.get(name, 0) for name in set(at.nodes))
                from_here = measurements.from_where_it_is(one, at, by_size, free)
            live = live_sizes(view)
            if held is not None and one.spec.plans and restarts_from(view, held.since) > now:
                here = from_here.get(held.gpu_type, {})
                here = {size: rate for size, rate in here.items() if size <= held.gpus or size in live}
                from_here |= {held.gpu_type: here} if here else {}
            elastic = ElasticGang(
                speeds=from_here,
                together=math.lcm(per_pod, degrees.gpus_per_stage if degrees is not None else 1)
                if one.spec.plans
                else one.spec.ranks_together(per_pod),
                live=not one.spec.plans,
                live_sizes=live,
                per_pod=per_pod,
                may_shrink=one.shrinks,
                may_grow=may_grow,
                may_move=may_move(view),
                pause_seconds=change_pause(view),
                restart_seconds=restart_seconds(view),
            )
    return ClusterJob(
        tenant=view.key[0],
        job=as_job(view, one.spec, gpus=one.gpus, rates=rates, now=now),
        launches=view.status.launches,
        placement=held.placement if held is not None else None,
        running_since=allocation.since.timestamp() if allocation is not None else 0.0,
        trains_from=trains_from(view, now),
        elastic=elastic,
        grows_from=None if grows_from is None else grows_from.timestamp(),
        asks=NodeRequest(one.barred, per_pod, one.topology),
        closed_pools=one.closed_pools,
        left_out="; ".join(filter(None, (view.lost_pool, one.left_out, alone))),
        usd_per_step=usd_per_step(view, capacity.regions, capacity.data_prices),
        usd_to_move=usd_to_move(view, capacity.regions, capacity.data_prices),
        data_region=one.spec.data.region if one.spec.data is not None else "",
        measured=any(speed.source != "unknown" for speed in known.values()),
        spread=None
        if at is None
        else measurements.spread_gang(
            one,
            at,
            packed,
            per_pod=per_pod,
            restart_seconds=restart_seconds(view),
            may_move=may_move(view) and not view.leaving,
        ),
        mixed=mixed_gang(one, capacity, measurements, speeds, may_grow=may_grow),
    )


def cluster_jobs(
    admitted: Sequence[Admitted],
    measurements: Measurements,
    capacity: ClusterCapacity,
    shared: SharedGpus,
    now: Time,
) -> tuple[ClusterJob, ...]:
    """A job for each that is admitted; ``shared``: who may share which GPUs. Raises JobFaults."""
    speeds = measurements.estimates(admitted, capacity.gpu_types)

    def seen(one: Admitted) -> ClusterJob:
        alone = sharing_text(one, shared)
        return cluster_job(one, speeds[one.key], measurements, capacity, now, alone)

    return tuple(each_job(admitted, seen, lambda one: one.key))


def mixed_gang(
    one: Admitted,
    capacity: ClusterCapacity,
    measurements: Measurements,
    speeds: Mapping[str, Estimate],
    *,
    may_grow: bool,
) -> MixedGang | None:
    """The gang in several pools as rounds see it; None where it has no room: it may be in one pool only.

    ``speeds``: GPU type -> what is known of the GPUs that it asks for. ``may_grow``: it may take more now.
    """
    view, room, spec, allocation = one.view, one.mixed, one.spec, one.view.running_allocation
    if room is None:
        return None
    resizes = allocation is not None and bool(allocation.parts) and view.may_change_size and not spec.plans
    rates = {gpu_type: speeds[gpu_type].steps_per_second for gpu_type in room.gpu_types}
    gang = MixedGang(
        pipeline=spec.launched_pipeline(measurements.profiles.layers(view.key, spec)),
        sizes=room.sizes,
        speeds={gpu_type: spec.gpu_speeds.get(gpu_type, rate) for gpu_type, rate in rates.items()},
        base=one.gpus,
        fits_one_pool=one.fits_one_pool,
        measured={
            at: known.steps_per_second
            for at, known in measurements.reported_by(view.key).items()
            if at.nodes is None
        },
        memory=within_limit(spec, capacity.memory),
        barred=room.barred,
        per_pod=spec.gpus_per_pod,
        planned=spec.planned_speeds,
        known_over_planned=known_over_planned(spec, rates, one.gpus),
        min_gain=spec.config.rebalance.min_gain,
        may_move=may_move(view) and not view.leaving and allocation is not None,
        may_shrink=resizes,
        may_grow=resizes and may_grow,
        pause_seconds=change_pause(view),
        restart_seconds=restart_seconds(view),
    )
    if one.fits_one_pool:
        return gang
    size = dataclasses.replace(gang, sizes=(one.gpus,))
    return dataclasses.replace(gang, mixtures=mixtures(size, room.gpus))


def as_job(view: JobView, spec: JobSpec, *, gpus: int, rates: Mapping[str, float], now: Time) -> Job:
    """The job as the policies see it; times in seconds."""
    status, asked = view.status, spec.asked
    done = status.progress.step if status.progress is not None else 0
    elapsed = 0.0 if view.created is None else (now - view.created).total_seconds()
    return Job(
        name=job_id(view.key),
        throughput=rates,
        gpus=gpus,
        weight=asked.weight,
        entity=asked.entity,
        user=asked.user or "",
        # A job that is about to end still counts: its last step is not announced yet.
        steps_remaining=float(max(1, spec.config.total_steps - done)),
        elapsed=max(0.0, elapsed - status.suspended_seconds),
        isolated_elapsed=status.isolated.seconds if status.isolated is not None else 0.0,
        deadline=None if asked.deadline is None else (asked.deadline - now).total_seconds(),
        budget=None if asked.budget is None else max(0.0, asked.budget - status.cost_so_far),
    )


def sizes_that_fit(
    one: Admitted, by_size: Mapping[str, Mapping[int, float]], capacity: ClusterCapacity
) -> dict[str, dict[int, float]]:
    """GPU type -> size -> steps/s, without sizes above its namespace's limit, or above a pool's memory.

    Of pools that are closed to the job nothing is asked; the size that it has stays.
    """
    by_size = {
        gpu_type: {size: rate for size, rate in found.items() if size <= one.most_of_type.get(gpu_type, size)}
        for gpu_type, found in by_size.items()
    }
    if not one.memory.limits:
        return {gpu_type: dict(found) for gpu_type, found in by_size.items()}
    held = one.view.held_placement
    open_pools = {(gpu_type, pool) for gpu_type, pool, taints in capacity.alike if taints not in one.barred}
    fitting = {
        gpu_type: {
            size: rate
            for size, rate in found.items()
            if (held is not None and size == held.gpus)
            or all(one.memory.fits(pool, size) for of_type, pool in open_pools if of_type == gpu_type)
        }
        for gpu_type, found in by_size.items()
    }
    return {gpu_type: found for gpu_type, found in fitting.items() if found}


STOP_SECONDS = 5.0
"""Part of that until its pods have saved and are gone."""


def may_grow_from(view: JobView) -> Time | None:
    """Time from which the gang may take more GPUs; None: as it is now, never."""
    allocation, spec = view.status.allocation, view.spec
    if allocation is None or spec is None or not view.may_change_size:
        return None
    began = allocation.since
    if spec.plans:
        began = began if live_sizes(view) else restarts_from(view, began)
    elif not _same_recipe(view, spec):
        return None
    if allocation.resized_at is None:
        return began
    settling = resize_cooldown_seconds(change_pause(view), allocation.failed_growths)
    return max(began, allocation.resized_at + datetime.timedelta(seconds=settling))


def restarts_from(view: JobView, since: Time) -> Time:
    """Time from which a gang of planned degrees, launched at ``since``, may take more GPUs by a restart."""
    return since + datetime.timedelta(seconds=resize_cooldown_seconds(restart_seconds(view)))


def live_sizes(view: JobView) -> tuple[int, ...]:
    """Sizes that a gang of planned degrees may have without a restart; of another: none."""
    launched = view.launched_spec
    if not view.live_plans or not view.resizable or launched is None or not _same_recipe(view, launched):
        return ()
    return tuple(view.live_plans)


def _same_recipe(view: JobView, spec: JobSpec) -> bool:
    """True if new pods would train with the configuration and the template that the gang was launched with.

    Most changes of a spec take effect at the next launch; ranks do not read how many
    stages the gang may have.
    """
    try:
        launched = decode_text(dict[str, Any], view.plan_config, limits=OBJECT)
    except ContractError:  # someone has changed the ConfigMap
        return False
    return view.has_template and _recipe(launched, spec) == _recipe(spec.config_fields, spec)


def _recipe(config: Mapping[str, Any], spec: JobSpec) -> dict[str, Any]:
    pipeline = config.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return dict(config)
    rest = {k: v for k, v in pipeline.items() if k not in ("minStages", "maxStages")}
    return {**config, "pipeline": rest} | ({"plan": None} if spec.asked.planner is not None else {})


def change_pause(view: JobView) -> float:
    """Seconds that training stands still when the gang changes its size: as last measured, else a second."""
    allocation = view.status.allocation
    if allocation is not None and allocation.resize_pause_ms is not None:
        return allocation.resize_pause_ms / 1000
    measured = [repack.pause_ms for repack in view.status.repacks if repack.pause_ms is not None]
    return measured[-1] / 1000 if measured else PAUSE_SECONDS


def may_move(view: JobView) -> bool:
    """True if the gang trains, and could save, stop and start in another pool: nothing else is under way."""
    allocation, spec = view.running_allocation, view.spec
    if allocation is None or spec is None or not view.acknowledged:
        return False
    return not (view.shrinking or allocation.joining or (spec.is_script and not view.has_spoken))


def restart_seconds(view: JobView) -> float:
    """Seconds from the gang's stop to its first step elsewhere, as long as its last start took."""
    running, allocation = view.status.condition(JobCondition.RUNNING), view.running_allocation
    if running is None or not running.is_true or allocation is None:
        return RESTART_SECONDS
    started = (running.last_transition_time - allocation.since).total_seconds()
    return STOP_SECONDS + started if started > 0 else RESTART_SECONDS


def trains_from(view: JobView, now: Time) -> float:
    """Epoch seconds when the ranks of the running gang had their plan; infinite: it starts.

    0: none runs, or it is not known, as a clock was set back since. A start ends, one way or the other, by
    the deadlines of its pods and of its plan's acknowledgement.
    """
    if view.running_allocation is None:
        return 0.0
    running = view.status.condition(JobCondition.RUNNING)
    if running is None or not running.is_true:
        return math.inf
    return running.last_transition_time.timestamp() if running.last_transition_time <= now else 0.0
