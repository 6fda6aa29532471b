"""PipeDream-2BW's planner: pipelines x stages, microbatch size, recomputation (dissertation 3.3).

For a model of equal blocks: every data-parallel size d and number of stages p with d p <= N, every
microbatch size b with and without recomputation, by closed forms (3.3.3).  With m = B / (d b)
microbatches per update and pipeline, c = 4/3 where activations are recomputed, else 1:

    t = max(c Tcomp + Tcomm between stages, Tcomm of the replicas / m)     seconds per microbatch
    bytes = 2 W / p + A + p Ain          without recomputation (p activations of A / p each)
    bytes = 2 W / p + A / p + p Ain      with it
"""

import dataclasses
from collections.abc import Mapping

from ballast_policies.planning.partition import PlanningError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockModel:
    """A model of equal blocks, as profiled.

    Attributes:
        blocks: how many.
        block_seconds: microbatch size -> forward and backward seconds of one block.
        weight_bytes: W, of the whole model, optimizer state included.
        activation_bytes: A of one sample, whole model.
        boundary_bytes: Ain of one sample: what enters a stage.
    """

    blocks: int
    block_seconds: Mapping[int, float]
    weight_bytes: float
    activation_bytes: float
    boundary_bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuServers:
    """Equal servers of equal GPUs.

    Attributes:
        gpus: N, in all.
        gpus_per_server: GPUs that share the fast links.
        memory_bytes: of one GPU.
        fast_bandwidth, slow_bandwidth: bytes/s inside a server, and between servers.
    """

    gpus: int
    gpus_per_server: int
    memory_bytes: float
    fast_bandwidth: float
    slow_bandwidth: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TwoVersionPlan:
    """The planner's answer.

    Attributes:
        pipelines: d, data-parallel copies.
        stages: p, of each.
        microbatch_size: b.
        recompute: activations are recomputed in the backward.
        microbatches: m per pipeline and update, so that m d b is the batch. (Algorithm 1 prints
            B / (N b), which is this for p = 1.)
        samples_per_second: predicted, of all pipelines.
        bytes: predicted, of one GPU.
    """

    pipelines: int
    stages: int
    microbatch_size: int
    recompute: bool
    microbatches: int
    samples_per_second: float
    bytes: float


def plan_two_versions(model: BlockModel, servers: GpuServers, *, batch_size: int) -> TwoVersionPlan:
    """The fastest plan that fits the memory and reaches the batch size exactly.

    Stages have blocks / p blocks each, so p divides the blocks; two versions need m >= p.

    Raises:
        PlanningError: nothing fits; the text gives the smallest need.
    """
    best: TwoVersionPlan | None = None
    least = float("inf")
    for pipelines in range(1, servers.gpus + 1):
        for stages in range(1, servers.gpus // pipelines + 1):
            if model.blocks % stages:
                continue
            for size in sorted(model.block_seconds):
                if batch_size % (pipelines * size) or batch_size // (pipelines * size) < stages:
                    continue
                for recompute in (False, True):
                    plan = _predicted(model, servers, batch_size, pipelines, stages, size, recompute)
                    least = min(least, plan.bytes)
                    fits = plan.bytes <= servers.memory_bytes
                    if fits and (best is None or plan.samples_per_second > best.samples_per_second):
                        best = plan
    if best is None:
        raise PlanningError(
            f"no plan on {servers.gpus} GPUs with {servers.memory_bytes:.3g} B reaches "
            f"a batch of {batch_size}: "
            + (
                f"the smallest needs {least:.3g} bytes a GPU. To fix: use more GPUs or more memory"
                if least < float("inf")
                else "no microbatch size divides it. To fix: use a multiple of the profiled sizes"
            )
        )
    return best


def memory_bytes(model: BlockModel, stages: int, microbatch_size: int, *, recompute: bool) -> float:
    """2BW: two weight versions, p activations in flight (or one, and the inputs to recompute from)."""
    activations = model.activation_bytes * microbatch_size
    inputs = stages * model.boundary_bytes * microbatch_size
    return 2 * model.weight_bytes / stages + activations / (stages if recompute else 1) + inputs


def gpipe_memory_bytes(model: BlockModel, stages: int, microbatch_size: int, microbatches: int) -> float:
    """GPipe with recomputation: one weight version, the inputs of all m microbatches."""
    activations = model.activation_bytes * microbatch_size / stages
    return model.weight_bytes / stages + activations + microbatches * model.boundary_bytes * microbatch_size


def microbatch_seconds(
    model: BlockModel,
    servers: GpuServers,
    *,
    pipelines: int,
    stages: int,
    microbatch_size: int,
    microbatches: int,
    recompute: bool,
) -> float:
    """The t of above: one microbatch passes each pipeline every t seconds.

    Replicas of a stage are placed together, so they use the fast links where d GPUs fit a server,
    and stages do where the whole d p do.
    """
    compute = model.blocks / stages * model.block_seconds[microbatch_size] * (4 / 3 if recompute else 1)
    inside = servers.fast_bandwidth if pipelines <= servers.gpus_per_server else servers.slow_bandwidth
    whole = pipelines * stages <= servers.gpus_per_server
    between = servers.fast_bandwidth if whole else servers.slow_bandwidth
    transfer = 2 * model.boundary_bytes * microbatch_size / between if stages > 1 else 0.0
    reduced = 2 * (pipelines - 1) / pipelines * model.weight_bytes / stages / inside
    return max(compute + transfer, reduced / microbatches)


def _predicted(
    model: BlockModel,
    servers: GpuServers,
    batch_size: int,
    pipelines: int,
    stages: int,
    size: int,
    recompute: bool,
) -> TwoVersionPlan:
    microbatches = batch_size // (pipelines * size)
    seconds = microbatch_seconds(
        model,
        servers,
        pipelines=pipelines,
        stages=stages,
        microbatch_size=size,
        microbatches=microbatches,
        recompute=recompute,
    )
    return TwoVersionPlan(
        pipelines=pipelines,
        stages=stages,
        microbatch_size=size,
        recompute=recompute,
        microbatches=microbatches,
        samples_per_second=pipelines * size / seconds,
        bytes=memory_bytes(model, stages, size, recompute=recompute),
    )
