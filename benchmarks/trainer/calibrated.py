"""Real ranks of the trainer whose layers take stated seconds: what the benchmarks of timing run.

A layer multiplies its input by a weight and *sleeps*: its forward and its backward each last the
seconds that the job states for the step (half of the backward for the input's gradient, half for the
weight's, where a schedule splits it).  So a pipeline of eight ranks can be timed on two cores: all but
the layers' seconds is real - processes, gloo, torch's schedules, meter, decision, moves, process groups.
Every result says ``"layers": "calibrated by sleeping"``.

This file is no benchmark itself; the others import it.
"""

import contextlib
import dataclasses
import multiprocessing
import queue
import socket
import time
from typing import Any

import numpy as np
import torch
from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import join, reach_store, serve_store
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.precision import LossScale
from ballast_trainer.loop.session import Session
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import build_model
from ballast_trainer.pipeline import layout
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.profile import LayerCosts
from ballast_trainer.reporting.console import SilentReporter
from harness import local_plan
from ranks_run.jobs import Job, Overhead, Ran
from ranks_run.scripted import Lines, ScriptedChannel, stages
from ranks_run.tracked_memory import TrackedMemory
from torch import nn

SAYS = "calibrated by sleeping"
DIM = 32


class _Clock:
    """Sleeps; what it overslept, up to ten milliseconds, comes off its next sleeps.

    Timers are late by a part of a millisecond, and by more where other programs fill the machine.
    """

    owed = 0.0
    most = 0.01

    @classmethod
    def sleep_until(cls, end: float) -> None:
        """Sleep until ``time.perf_counter()`` is ``end``, less what is owed."""
        wanted = end - time.perf_counter()
        if wanted <= cls.owed:
            cls.owed -= max(0.0, wanted)
            return
        aim = end - cls.owed
        time.sleep(wanted - cls.owed)
        cls.owed = min(cls.most, max(0.0, time.perf_counter() - aim))


class _Nap(torch.autograd.Function):
    """The value itself; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, layer: "SleepingLayer") -> torch.Tensor:
        ctx.layer = layer
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _Clock.sleep_until(time.perf_counter() + ctx.layer.backward_seconds / 2)
        return gradient, None


class SleepingLayer(nn.Module):
    """[B, DIM] -> [B, DIM], in as many seconds as it is told."""

    def __init__(self, numbers: int = DIM, forward_seconds: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numbers))
        self.forward_seconds, self.backward_seconds = forward_seconds, 2 * forward_seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Sleep and multiply."""
        # A forward that is repeated for the backward ends with the last tensor that it keeps.
        _Clock.sleep_until(time.perf_counter() + self.forward_seconds)
        # Once on the way to the input, once on the way to the weight.
        out: torch.Tensor = _Nap.apply(value, self) * _Nap.apply(self.weight, self)[:DIM]
        return out


class StatedLoads(Dynamic):
    """Tells each layer its seconds at every step at which they change.

    Args:
        loads: as of the job.
        speed: of this rank.
    """

    def __init__(self, loads: np.ndarray, speed: float = 1.0) -> None:
        self._loads = loads / speed

    def _tell(self, step: int, layers: LayerSet) -> None:
        for layer in layers:
            layer.module.forward_seconds, layer.module.backward_seconds = self._loads[step, layer.index]

    def reapply(self, step: int, layers: LayerSet) -> None:
        """Layers that were built or received."""
        self._tell(min(step, len(self._loads) - 1), layers)

    def apply(self, step: int, layers: LayerSet, world: Any) -> bool:
        """True if this step's loads are other ones."""
        self._tell(step, layers)
        return step > 0 and not np.array_equal(self._loads[step], self._loads[step - 1])


def steady_model(layers: int, numbers: int, forward_seconds: float) -> Model:
    """Model of sleeping layers with ``numbers`` weights, always as fast; a backward takes twice a forward."""
    return dataclasses.replace(
        sleeping_model(layers),
        build_layer=lambda index: SleepingLayer(numbers, forward_seconds),
        independent_layers=True,
    )


def sleeping_model(layers: int) -> Model:
    """Model of as many sleeping layers."""

    def batch(seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The first layer's input has a gradient, or its backward would have nothing to wait for.
        return torch.ones(size, DIM, requires_grad=True), torch.zeros(size, DIM)

    return Model(
        family="sleeping",
        layer_count=layers,
        build_layer=lambda index: SleepingLayer(),
        loss=nn.functional.mse_loss,
        batch=batch,
    )


def _rank_main(rank: int, port: int, job: Job, results: Any) -> None:
    tracked = TrackedMemory()
    with tracked if job.tracks_memory else contextlib.nullcontext():
        found = _train(rank, port, job)
    results.put((rank, *found, tracked.most))
    if rank == 0:
        time.sleep(0.5)  # the store lives here: the others leave first


def _train(rank: int, port: int, job: Job) -> tuple[list[dict[str, Any]], LayerCosts, Overhead]:
    """Train as one rank."""
    torch.set_num_threads(1)
    layout.DEFAULT_STAGES_PER_RANK = job.chunks
    config = job.config
    speed = job.speeds[rank] if job.speeds else 1.0
    model = sleeping_model(job.loads.shape[1]) if job.model is None else build_model(config.model)
    plan = local_plan([f"rank-{n}" for n in range(job.ranks)], network=43)
    store = (serve_store if rank == 0 else reach_store)("127.0.0.1", port, 60)
    device = torch.device("cpu")
    run = RunState(plan=plan, loss_scale=LossScale(config.training.precision))
    training = ModelState(
        config=config,
        definition=model,
        device=device,
        dynamics=(StatedLoads(job.loads, speed),) if job.model is None else (),
        layers=LayerSet(model, config.training, device, lambda index, module: module),
        meter=Meter(model.layer_count, device, None, clock=time.perf_counter if job.model is None else None),
        world=join(
            store=store,
            plan=plan,
            rank=rank,
            device=device,
            timeout_seconds=60,
            mesh=Mesh(data=config.parallelism.data),
        ),
        loss=run.loss_scale.scaled(model.loss),
        stages=(),
    )
    training.stages = stages(job.bounds, training.placement(job.ranks))
    channel_thread = ChannelThread(ScriptedChannel(plan, job.replans), plan) if rank == 0 else None
    lines = Lines()
    session = Session(
        training,
        run,
        channel_thread=channel_thread,
        reporter=lines if rank == 0 else SilentReporter(),
        stop=StopSignal(),
    )
    session.run()
    return (
        lines.lines,
        training.profile.costs(),
        Overhead(deciding=session.progress.deciding_seconds, moving=session.progress.moving_seconds),
    )


def run(job: Job, *, limit_seconds: float = 600.0) -> Ran:
    """Run the job.

    Raises:
        RuntimeError: a rank failed, or they did not finish within ``limit_seconds``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ballast_trainer.preload", "calibrated"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, port, job, results)) for rank in range(job.ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Ran] = {}
    deadline = time.monotonic() + limit_seconds
    try:
        while len(found) < len(processes):
            try:
                rank, *rest = results.get(timeout=1.0)
            except queue.Empty:
                failed = [process.name for process in processes if process.exitcode]
                if failed or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{failed or 'not all ranks'} ended within {limit_seconds} s"
                    ) from None
                continue
            found[rank] = Ran(*rest)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    most = tuple(found[rank].most_bytes for rank in sorted(found))
    return dataclasses.replace(found[0], most_bytes=most)
