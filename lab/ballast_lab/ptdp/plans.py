"""Pipeline x tensor x data parallel plans for one transformer on equal servers (dissertation 4.3).

Step time is equation 4.1 with the transfers of ``communication`` added; activations are recomputed
from each layer's input.  The three take-aways (tensor parallelism inside a server, model parallelism
just large enough to fit, microbatch size by search) come out of the search, they are not built in.
"""

import dataclasses

from ballast_policies.planning.partition import PlanningError

from ballast_lab.ptdp.communication import (
    data_parallel_elements,
    scattered_pipeline_elements,
    tensor_parallel_elements,
)
from ballast_lab.ptdp.transformer import Transformer

_ELEMENT_BYTES = 2
"""Activations and gradients travel in 16 bits."""
_STATE_BYTES = 18
"""Bytes of a parameter in mixed precision: 2 weight, 4 gradient, 12 Adam with master weights."""


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
class PtdPlan:
    """p x t x d and a microbatch size.

    Attributes:
        pipeline, tensor, data: p, t, d; p t d is the GPUs.
        microbatch_size: b.
        microbatches: m per pipeline.
        step_seconds: predicted.
        bytes: predicted, of one GPU.
    """

    pipeline: int
    tensor: int
    data: int
    microbatch_size: int
    microbatches: int
    step_seconds: float
    bytes: float


def plan_ptdp(
    model: Transformer,
    servers: GpuServers,
    *,
    batch_size: int,
    flops_per_second: float,
    half_speed: float = 0.0,
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    most: int = 5,
) -> tuple[PtdPlan, ...]:
    """The fastest plans that fit, best first.

    Args:
        model: the transformer.
        servers: the GPUs.
        batch_size: B.
        flops_per_second: what one GPU achieves on large products.
        half_speed: b h / t of a product that runs at half of that; 0: all run alike.
        microbatch_sizes: b to try.
        most: how many plans.

    Raises:
        PlanningError: none fits.
    """
    plans = []
    n = servers.gpus
    for tensor in (t for t in range(1, n + 1) if n % t == 0 and model.hidden % t == 0):
        for pipeline in (p for p in range(1, n // tensor + 1) if n // tensor % p == 0):
            data = n // tensor // pipeline
            if model.layers % pipeline or batch_size % data:
                continue
            plans += [
                _predicted(
                    model,
                    servers,
                    batch_size,
                    flops_per_second * efficiency(model.hidden * size / tensor, half_speed),
                    pipeline,
                    tensor,
                    size,
                )
                for size in microbatch_sizes
                if batch_size // data % size == 0
            ]
    fitting = [plan for plan in plans if plan.bytes <= servers.memory_bytes]
    if not fitting:
        least = min((plan.bytes for plan in plans), default=float("inf"))
        raise PlanningError(
            f"no p x t x d over {n} GPUs fits {servers.memory_bytes:.3g} bytes; the least is {least:.3g}. "
            "To fix: use more GPUs, or a batch and layers that more of their divisors divide"
        )
    return tuple(sorted(fitting, key=lambda plan: (plan.step_seconds, plan.tensor, plan.pipeline))[:most])


def efficiency(size: float, half_speed: float) -> float:
    """The part of a GPU's speed that a product of b h / t = z columns reaches: z / (z + z at half)."""
    return size / (size + half_speed)


def _predicted(
    model: Transformer,
    servers: GpuServers,
    batch_size: int,
    flops_per_second: float,
    pipeline: int,
    tensor: int,
    size: int,
) -> PtdPlan:
    data = servers.gpus // tensor // pipeline
    microbatches = batch_size // data // size
    per_server = servers.gpus_per_server
    fast, slow = servers.fast_bandwidth, servers.slow_bandwidth
    compute = model.step_flops(size) / (pipeline * tensor * flops_per_second)
    shape = (size, model.sequence, model.hidden)
    reduced = tensor_parallel_elements(*shape, tensor, model.layers // pipeline) * _ELEMENT_BYTES
    passed = scattered_pipeline_elements(*shape, tensor) * _ELEMENT_BYTES if pipeline > 1 else 0.0
    held = model.parameters / (pipeline * tensor)
    microbatch = compute + reduced / (fast if tensor <= per_server else slow)
    transfer = passed / (fast if tensor * pipeline <= per_server else slow)
    exchange = data_parallel_elements(held, data) * _ELEMENT_BYTES
    exchange /= fast if tensor * data <= per_server and pipeline == 1 else slow
    step = (microbatches + pipeline - 1) * microbatch + 2 * (pipeline - 1) * transfer + exchange
    in_flight = min(microbatches, pipeline)
    inputs = in_flight * model.layers // pipeline * size * model.sequence * model.hidden * _ELEMENT_BYTES
    return PtdPlan(
        pipeline=pipeline,
        tensor=tensor,
        data=data,
        microbatch_size=size,
        microbatches=microbatches,
        step_seconds=step,
        bytes=held * _STATE_BYTES + inputs,
    )
