"""One look at the cluster, as the values that the policies decide on."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.rounds import Node, Placement

from ballast_operator.allocator.gang_size import Refusal, admission_error, gang_size, growth_sizes, may_grow
from ballast_operator.allocator.throughput import GangRequest, Measurements
from ballast_operator.api.cause import Cause
from ballast_operator.api.cluster_policy import ClusterPolicySpec, NodePool
from ballast_operator.api.training_job_status import JobAllocation
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView, foreign_use
from ballast_operator.views.spec import JobSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at one moment.

    Attributes:
        nodes: of the pools, with the GPUs that are ours to hand out.
        members: pool -> its ready nodes.
        problem: the jobs that want GPUs, as an allocation problem.
        running: job name -> its placement, for gangs that hold GPUs and go on.
        running_since: job name -> epoch seconds.
        leaving: jobs whose gang is ending and that will want GPUs again.
        growable: job -> sizes that it could grow to, fewest first, for gangs that may grow now.
        unmeasured: jobs of whose speed nothing is known: any figure of theirs is a guess.
        refusals: jobs that cannot be placed by this policy.
        overlaps: nodes that match two pools, in words.
        empty_pools, pools_without_gpus: pools without nodes; pools whose nodes offer no GPU.
    """

    nodes: tuple[Node, ...]
    members: Mapping[str, tuple[str, ...]]
    problem: Problem
    running: Mapping[str, Placement]
    running_since: Mapping[str, float]
    launches: Mapping[str, int]
    keys: Mapping[str, Key]
    unmeasured: frozenset[str]
    refusals: Mapping[Key, Refusal]
    overlaps: tuple[str, ...]
    empty_pools: tuple[str, ...]
    pools_without_gpus: tuple[str, ...]
    growable: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def job_id(key: Key) -> str:
    """A job's name in problems and rounds."""
    return f"{key[0]}/{key[1]}"


def take_snapshot(
    spec: ClusterPolicySpec,
    *,
    nodes: Mapping[str, NodeView],
    pods: Sequence[Object],
    jobs: Sequence[JobView],
    measurements: Measurements,
    now: Time,
) -> Snapshot:
    """What the policy ``spec`` has to decide on."""
    pools, overlaps = assign_nodes(spec.node_pools, nodes)
    held_on: dict[str, Counter[str]] = defaultdict(Counter)
    for view in jobs:
        allocation = view.status.allocation
        if allocation is not None and allocation.ending is None:
            held_on[allocation.pool].update(allocation.nodes)
    values: list[Node] = []
    for pool in spec.node_pools:
        foreign = foreign_use(pods, pool.gpu_resource)
        for node in pools[pool.name]:
            # A node that takes no new pods is there only for the gangs that run on it.
            free = node.gpus(pool.gpu_resource) - foreign[node.name]
            gpus = free if node.schedulable else min(free, held_on[pool.name][node.name])
            values.append(Node(name=node.name, pool=pool.name, gpu_type=pool.gpu_type, gpus=max(0, gpus)))
    capacity: Counter[str] = Counter()
    by_pool: Counter[str] = Counter()
    for value in values:
        capacity[value.gpu_type] += value.gpus
        by_pool[value.pool] += value.gpus
    gpu_types = tuple(sorted({pool.gpu_type for pool in spec.node_pools}))
    problem_jobs, keys, launches, refusals = [], {}, {}, {}
    running, since, unmeasured, growable = {}, {}, set(), {}
    takers = []
    for view in jobs:
        if not wants_gpus(view, now):
            continue
        assert view.spec is not None
        allocation = (
            view.status.allocation
            if view.status.allocation is not None and view.status.allocation.ending is None
            else None
        )
        allowed = [t for t in gpu_types if not view.spec.gpu_types or t in view.spec.gpu_types]
        size = (
            len(allocation.pods)
            if allocation is not None
            else gang_size(view, spec.node_pools, by_pool, allowed)
        )
        refusal = (
            None
            if allocation is not None
            else admission_error(view.spec, spec.node_pools, by_pool, allowed, size)
        )
        if refusal is not None:
            refusals[view.key] = refusal
            continue
        takers.append((view, GangRequest(key=view.key, spec=view.spec, stages=size), allocation, allowed))
    speeds = measurements.estimates((wanted for _, wanted, _, _ in takers), gpu_types)
    for view, wanted, allocation, allowed in takers:
        name, size = job_id(view.key), wanted.stages
        known = {gpu_type: speeds[view.key][gpu_type] for gpu_type in allowed}
        rates = {gpu_type: speed.steps_per_second for gpu_type, speed in known.items()}
        if all(speed.source == "unknown" for speed in known.values()):
            unmeasured.add(name)
        problem_jobs.append(as_job(view, wanted.spec, name=name, gpus=size, rates=rates, now=now))
        keys[name], launches[name] = view.key, view.status.launches
        if allocation is not None:
            running[name] = Placement(
                gpu_type=allocation.gpu_type, pool=allocation.pool, nodes=allocation.nodes
            )
            since[name] = allocation.since.timestamp()
            if may_grow(view, now):
                growable[name] = growth_sizes(view)
    return Snapshot(
        nodes=tuple(values),
        members={name: tuple(node.name for node in members) for name, members in pools.items()},
        problem=Problem(
            gpu_types=gpu_types,
            capacity=dict(capacity),
            jobs=tuple(problem_jobs),
            prices=price_by_type(spec.node_pools, by_pool),
        ),
        running=running,
        running_since=since,
        launches=launches,
        keys=keys,
        unmeasured=frozenset(unmeasured),
        growable=growable,
        refusals=refusals,
        overlaps=tuple(overlaps),
        empty_pools=tuple(name for name, members in pools.items() if not members),
        pools_without_gpus=tuple(
            pool.name
            for pool in spec.node_pools
            if pools[pool.name] and not any(node.gpus(pool.gpu_resource) for node in pools[pool.name])
        ),
    )


def assign_nodes(
    pools: Sequence[NodePool], nodes: Mapping[str, NodeView]
) -> tuple[dict[str, list[NodeView]], list[str]]:
    """(pool -> its nodes by name, nodes that match two pools in words)."""
    members: dict[str, list[NodeView]] = {pool.name: [] for pool in pools}
    overlaps = []
    for name in sorted(nodes):
        labels = nodes[name].labels
        matching = [p.name for p in pools if all(labels.get(k) == v for k, v in p.node_selector.items())]
        if len(matching) > 1:
            overlaps.append(f"node {name} matches pools {' and '.join(matching)}")
        elif matching:
            members[matching[0]].append(nodes[name])
    return members, overlaps


def wants_gpus(view: JobView, now: Time) -> bool:
    """Whether the job takes part in the allocation."""
    status = view.status
    if view.deleting or view.spec is None or status.finished or view.finished_step is not None:
        return False
    if view.spec.suspend or (status.next_launch_at is not None and status.next_launch_at > now):
        return False
    return (
        status.allocation is None
        or status.allocation.ending is None
        or status.allocation.ending.cause is not Cause.COMPLETED
    )


def as_job(
    view: JobView, spec: JobSpec, *, name: str, gpus: int, rates: Mapping[str, float], now: Time
) -> Job:
    """The job as the policies see it; times in seconds."""
    status = view.status
    done = status.progress.step if status.progress is not None else 0
    elapsed = 0.0 if view.created is None else (now - view.created).total_seconds()
    return Job(
        name=name,
        throughput=rates,
        gpus=gpus,
        weight=spec.weight,
        entity=spec.entity,
        # A job that is about to end still counts: its last step is not announced yet.
        steps_remaining=float(max(1, spec.total_steps - done)),
        elapsed=max(0.0, elapsed - status.suspended_seconds),
        isolated_elapsed=status.isolated.seconds if status.isolated is not None else 0.0,
        deadline=None if spec.deadline is None else (spec.deadline - now).total_seconds(),
    )


def price_by_type(pools: Sequence[NodePool], gpus: Mapping[str, int]) -> dict[str, float]:
    """GPU type -> mean price of its pools by their ``gpus``; without types of which no pool has a price."""
    found: dict[str, list[tuple[float, int]]] = {}
    for pool in pools:
        if pool.price_per_gpu_hour > 0:
            found.setdefault(pool.gpu_type, []).append((pool.price_per_gpu_hour, gpus.get(pool.name, 0)))
    prices = {}
    for gpu_type, entries in found.items():
        total = sum(count for _, count in entries)
        if total > 0:
            prices[gpu_type] = sum(price * count for price, count in entries) / total
        else:
            prices[gpu_type] = sum(price for price, _ in entries) / len(entries)
    return prices


def held_by_pool(jobs: Sequence[JobView]) -> Counter[str]:
    """Pool -> GPUs that jobs hold, those on their way out included."""
    found: Counter[str] = Counter()
    for view in jobs:
        allocation: JobAllocation | None = view.status.allocation
        if allocation is not None:
            found[allocation.pool] += len(allocation.pods)
    return found
