"""The allocation of a job, and what it has cost: parts of ``TrainingJob.status``."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from ballast_policies.accounting import price_part
from ballast_policies.contract.limits import MOST_EPOCH
from ballast_policies.contract.messages import Candidate
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES
from ballast_policies.protocol.observed import Cause
from ballast_policies.rounds.values import Placement, PoolPart
from pydantic import Field, WithJsonSchema, field_serializer, field_validator

from ballast_operator.api.base import Name, StatusModel, Text, Time, listed


def coming_node(pool: str, number: int) -> str:
    """Name of a node of ``pool`` that does not exist yet; no node can have it."""
    return f"{pool}/new-{number}"


def pool_to_grow(node: str) -> str:
    """The pool of a node that does not exist yet."""
    return node.rpartition("/new-")[0]


def is_coming(node: str) -> bool:
    """True if the name is that of a node that does not exist yet."""
    return "/" in node


class Ending(StatusModel):
    """A launch that is being ended."""

    cause: Annotated[Cause, WithJsonSchema({"type": "string", "maxLength": 253})]
    """Cause, in a word."""
    message: Text = ""
    """Reason, in a sentence."""
    since: Time
    """Time of the decision."""

    @field_validator("cause", mode="before")
    @classmethod
    def _known(cls, cause: object) -> object:
        # One of a newer release: it saves what it has, and counts as no failure of the job.
        return cause if cause in tuple(Cause) else Cause.PREEMPTED


class NodesLeaving(StatusModel):
    """Nodes of the gang that have announced that they go."""

    nodes: Annotated[tuple[Name, ...], listed(1024)] = ()
    """Their names."""
    seen: Annotated[tuple[Time, ...], listed(1024)] = ()
    """Times when each of them was first seen to go."""
    by: Annotated[str, Field(max_length=1024)] = ""
    """Source of the notice: a taint, a condition, an eviction."""
    since: Time
    """Time when that was first seen of the node that goes first."""
    at: Time
    """Time when the first of them goes."""

    def seen_first(self, node: str) -> Time | None:
        """Time when the node was first seen to go; None: it was not among them."""
        if node not in self.nodes:
            return None
        number = self.nodes.index(node)
        return self.seen[number] if number < len(self.seen) else self.since


class AllocationPart(StatusModel):
    """The GPUs of one pool of a gang that runs in several."""

    pool: Name
    """The pool's name."""
    gpu_type: Name
    """Type of its GPUs."""
    pods: Annotated[tuple[Name, ...], listed(1024)] = ()
    """Names of the pods there, by rank at launch."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Speed of a GPU, relative to the other parts', by which the first stages were cut."""


class SharedGpu(StatusModel):
    """The GPU of a job that may share it."""

    partner: Name = ""
    """The job that is on it as well, as namespace/name: each pays half of the price then. Empty: none."""


class LaunchDegrees(StatusModel):
    """Division of the work among the ranks of a launch, as planned for its GPUs."""

    tensor: Annotated[int, Field(ge=1)] = 1
    """Tensor degree."""
    data: Annotated[int, Field(ge=1)] = 1
    """Data degree."""
    microbatches: Annotated[int, Field(ge=1)] = 1
    """Microbatches of a step, over all replicas."""
    recompute: bool = False
    """Forwards are repeated."""
    recompute_every: Annotated[int, Field(ge=1)] = 1
    """Layers that repeat their forward, as of ``training``."""
    schedule: Name = DEFAULT_SCHEDULE
    """Order of the microbatches."""
    layers: Annotated[tuple[Annotated[int, Field(ge=1)], ...], listed(1024)] = ()
    """Layers of each stage."""
    step_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Predicted of a step."""
    memory_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Predicted of the fullest GPU."""
    measured_on: Annotated[tuple[Name, ...], listed(16)] = ()
    """GPU types with measured layers, by which it was planned."""

    @property
    def repeated(self) -> int:
        """Number of layers of which one repeats its forward; 0: none does."""
        return self.recompute_every if self.recompute else 0

    @property
    def gpus_per_stage(self) -> int:
        """GPUs that hold a stage, which are in one pool."""
        return self.tensor * self.data

    @property
    def positions(self) -> int:
        """Positions of the pipeline: ranks that have its stages."""
        kind = SCHEDULES.get(self.schedule)
        return max(1, len(self.layers) // (1 if kind is None else kind.stages_on_a_rank()))

    def divides_as(self, other: "LaunchDegrees") -> bool:
        """True if ranks get from one to the other as they train: layers move, schedule and repeats change."""
        alike = ("tensor", "data", "microbatches", "positions")
        return all(getattr(self, name) == getattr(other, name) for name in alike)

    def under(self, candidate: Candidate) -> "LaunchDegrees":
        """The division of a launch with these degrees whose ranks go on by a candidate."""
        fields = dict(candidate)
        repeated = fields.pop("repeated")
        if repeated is not None:
            fields.update(recompute=repeated > 0, recompute_every=max(1, repeated))
        return self.replace(**fields)

    @property
    def recomputed_as_text(self) -> str:
        """Layers that repeat their forward, with a comma; empty: none."""
        return (", recomputed" + f" 1 layer of {self.repeated}" * (self.repeated > 1)) * self.recompute

    def __str__(self) -> str:
        count, layers, again = len(self.layers), ", ".join(map(str, self.layers)), self.recomputed_as_text
        named = self.schedule != DEFAULT_SCHEDULE
        by = f" from layers measured on {', '.join(self.measured_on)}" if self.measured_on else ""
        return (
            f"tensor {self.tensor} x data {self.data} x {count} stage{'s' * (count > 1)} of {layers} layers, "
            f"{self.microbatches} microbatches{again}{f', {self.schedule}' * named}: "
            f"{self.step_seconds:.3g} s a step predicted{by}"
        )


class JobAllocation(StatusModel):
    """The GPUs that the job holds, or is about to hold. Written before the first pod is made."""

    gpu_type: Name
    """Type of the GPUs; of a gang in several pools, that of rank 0."""
    all_gpu_types: Text = ""
    """Types of its GPUs in the order of the ranks, as ``kubectl get`` shows them: ``v100``, ``v100+k80``."""
    pool: Name
    """Node pool they are in; of a gang in several, that of rank 0."""
    gpus: Annotated[int, Field(ge=0)]
    """Number of GPUs."""
    gpus_per_pod: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of them in each pod, one for each of its ranks."""
    pods: Annotated[tuple[Name, ...], listed(1024)] = ()
    """Names of the pods, by rank at launch."""
    nodes: Annotated[tuple[Name, ...], listed(1024)] = ()
    """Node of each of the pods; ``pool/new-0``, ``pool/new-1``...: one that does not exist yet."""
    parts: Annotated[tuple[AllocationPart, ...], listed(64)] = ()
    """Parts of a gang in several pools, in the order of the ranks; empty: it is in one."""
    degrees: LaunchDegrees | None = None
    """Degrees of a job with ``planner``, as planned for its GPUs."""
    plan_id: Name = ""
    """The round that chose it."""
    launch: Annotated[int, Field(ge=1, le=MOST_EPOCH)] = 1
    """Number of the launch, from 1."""
    since: Time
    """Time when it was given."""
    joining: Annotated[tuple[Name, ...], listed(1024)] = ()
    """Pods that are to join the running gang, and have not yet."""
    joining_since: Time | None = None
    """Time of the last growth's decision."""
    resized_at: Time | None = None
    """Time when the gang last changed its size, or gave a growth up."""
    resize_pause_ms: Annotated[float, Field(ge=0)] | None = None
    """Milliseconds that training stood still for its last change of size."""
    failed_growths: Annotated[int, Field(ge=0)] = 0
    """Growths that were given up since the last change of size that succeeded."""
    first_newcomer: Annotated[int, Field(ge=0)] = 0
    """Number in the name of the first pod of the last growth; 0: the gang has not grown."""
    master_address: Name = ""
    """Address of rank 0 that a job without a model told its other ranks; empty: not yet."""
    template: Name = ""
    """Digest of its pods' template: no others are added; empty: not known."""
    pod_group: Name = ""
    """The PodGroup of Kubernetes that its pods are; empty: the API server had none when it was given."""
    leaving: NodesLeaving | None = None
    """Nodes that are about to go; absent: none is."""
    shared_gpu: SharedGpu | None = None
    """GPU of a job that may share it, in a pool with ``sharing``; absent: its GPUs are its own."""
    ending: Ending | None = None
    """Set once the launch has to end; never unset."""
    ended: Annotated[tuple[Name, ...], listed(1024)] = ()
    """Pods that have ended of a launch that ends, or whose job is being deleted: their GPUs are paid no
    more, and others may take them."""

    @field_serializer("all_gpu_types")
    def _types_by_rank(self, written: str) -> str:
        """GPU types of the parts that it has now, whatever was written."""
        return "+".join(dict.fromkeys(part.gpu_type for part in self.by_pool))

    @property
    def placement(self) -> Placement:
        """Placement of the gang; a node for each GPU, so several for a pod with several."""
        nodes = tuple(node for node in self.nodes for _ in range(self.gpus_per_pod))
        parts = self.by_pool if self.parts else ()
        return Placement(gpu_type=self.gpu_type, pool=self.pool, nodes=nodes, parts=parts)

    @property
    def by_pool(self) -> tuple[PoolPart, ...]:
        """Its GPUs by pool, in the order of the ranks."""
        if not self.parts:
            return (PoolPart(pool=self.pool, gpu_type=self.gpu_type, gpus=self.gpus),)
        counts = Counter(self.part_of(pod).pool for pod in self.pods)
        types = {self.pool: self.gpu_type, **{part.pool: part.gpu_type for part in self.parts}}
        return tuple(
            PoolPart(pool=pool, gpu_type=types[pool], gpus=count * self.gpus_per_pod)
            for pool, count in counts.items()
        )

    @property
    def on_nodes_by_pool(self) -> tuple[PoolPart, ...]:
        """Parts of :attr:`by_pool` that are paid: no nodes that do not exist yet, no pods that have ended."""
        ended = set(self.ended)
        there = {pod: node for pod, node in self.node_of.items() if not is_coming(node) and pod not in ended}
        if not self.parts or not there:
            gpus = len(there) * self.gpus_per_pod
            return (PoolPart(pool=self.pool, gpu_type=self.gpu_type, gpus=gpus),)
        return self.by_pool if len(there) == len(self.pods) else self.with_pods(there).by_pool

    @property
    def partner(self) -> str:
        """The job that is on its GPU as well; empty: none."""
        return self.shared_gpu.partner if self.shared_gpu is not None else ""

    @property
    def shared_node(self) -> str:
        """The node of the GPU that it shares, or may share; empty: its GPUs are its own."""
        return self.nodes[0] if self.shared_gpu is not None and self.nodes else ""

    @property
    def price_part(self) -> float:
        """The part of its GPUs' price that it pays now."""
        return price_part(shared=bool(self.partner))

    @property
    def pays(self) -> bool:
        """True if it holds GPUs that are paid."""
        return any(part.gpus for part in self.on_nodes_by_pool)

    def part_of(self, pod: str) -> AllocationPart:
        """The part of the gang that has the pod."""
        for part in self.parts:
            if pod in part.pods:
                return part
        return AllocationPart(pool=self.pool, gpu_type=self.gpu_type, pods=self.pods)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of each rank's GPU; empty: the gang is in one pool."""
        if not self.parts:
            return ()
        return tuple(self.part_of(pod).speed for pod in self.pods for _ in range(self.gpus_per_pod))

    @property
    def pools_to_grow(self) -> tuple[str, ...]:
        """Pools whose nodes of the gang do not all exist yet."""
        return tuple(dict.fromkeys(pool_to_grow(node) for node in self.nodes if is_coming(node)))

    def settled(self, node_of: Mapping[str, str]) -> "JobAllocation":
        """The allocation with the nodes on which its pods run; ``node_of``: pod -> node, if it is bound."""
        nodes = tuple(node_of.get(pod) or node for pod, node in self.node_of.items())
        return self if nodes == self.nodes else self.replace(nodes=nodes)

    def resized(self, at: Time, pause_ms: float | None) -> "JobAllocation":
        """The allocation once the gang has changed its size at ``at``, with the pause that rank 0 reports."""
        return self.replace(resized_at=at.replace(microsecond=0), resize_pause_ms=pause_ms, failed_growths=0)

    @property
    def node_of(self) -> Mapping[str, str]:
        """Pod -> its node, in the order of the pods."""
        return dict(zip(self.pods, self.nodes, strict=True))

    def with_pods(self, node_of: Mapping[str, str], **changes: Any) -> "JobAllocation":
        """The allocation with these pods, each on its node, in this order.

        What is left of a gang in several pools may be in one; newcomers are in the pool of its last ranks.
        """
        pods, nodes = tuple(node_of), tuple(node_of.values())
        if self.parts and pods:
            first, left = self.part_of(pods[0]), []
            for part in self.parts:
                kept = tuple(pod for pod in part.pods if pod in node_of)
                left += [part.replace(pods=kept)] if kept else []
            new = tuple(pod for pod in pods if pod not in self.node_of)
            if left:  # else a hand has written parts that have none of the pods
                left[-1] = left[-1].replace(pods=(*left[-1].pods, *new))
            changes = {"pool": first.pool, "gpu_type": first.gpu_type, **changes}
            changes["parts"] = tuple(left) if len(left) > 1 else ()
        return self.replace(pods=pods, nodes=nodes, gpus=len(pods) * self.gpus_per_pod, **changes)

    def in_pools(self, pool_of: Mapping[str, str]) -> "JobAllocation | None":
        """The allocation by the pools that its nodes are in; None: a part of it is in none, or in two.

        ``pool_of``: node -> pool; a node that is missing is where the allocation has it.
        """
        found: list[AllocationPart] = []
        node_of = self.node_of
        for part in self.parts or (self.part_of(""),):
            pools = {pool_of.get(node_of[pod], part.pool) for pod in part.pods} or {part.pool}
            if len(pools) > 1:
                return None
            (pool,) = pools
            if found and found[-1].pool == pool:
                found[-1] = found[-1].replace(pods=(*found[-1].pods, *part.pods))
            else:
                found.append(part.replace(pool=pool))
        if len({part.pool for part in found}) < len(found):
            return None
        pool, parts = found[0].pool, tuple(found) if len(found) > 1 else ()
        return self if (pool, parts) == (self.pool, self.parts) else self.replace(pool=pool, parts=parts)

    def named_as(self, placement: Placement | None) -> "JobAllocation":
        """The allocation with the names that ``placement`` has for its pools; itself if that is elsewhere."""
        by_pool = {} if placement is None else placement.nodes_by_pool
        found = self.in_pools({node: pool for pool, nodes in by_pool.items() for node in nodes})
        return found if found is not None and found.placement == placement else self


class PoolCost(StatusModel):
    """Cost to the job of GPUs of one pool, up to ``costAt``."""

    pool: Name
    """The pool's name."""
    gpu_type: Name = ""
    """Its GPU type."""
    gpu_seconds: Annotated[float, Field(ge=0)] = 0.0
    """GPUs held x seconds."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """Their cost."""
    startup_cost: Annotated[float, Field(ge=0)] = 0.0
    """The part of ``cost`` in which no step was done: before all ranks train, and while they leave."""
    data_cost: Annotated[float, Field(ge=0)] = 0.0
    """Besides ``cost``: what data cost that was read there from other regions."""
