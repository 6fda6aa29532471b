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
import itertools
import multiprocessing
import queue
import socket
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch
from ballast_policies.contract import Directive, Plan, Stage
from ballast_policies.contract.job import JobConfig
from ballast_trainer.channel.base import Messages
from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import join, reach_store, serve_store
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.dynamics.protocol import UnchangedHooks
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.loop.session import Session
from ballast_trainer.loop.state import Overhead, TrainingState
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import build_model
from ballast_trainer.pipeline import layout
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.profile import LayerCosts, Profile
from ballast_trainer.reporting.console import SilentReporter
from harness import local_plan
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

SAYS = "calibrated by sleeping"
DIM = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to run.

    Attributes:
        loads: seconds of one microbatch, shape (steps, layers, 2): forward, backward. Of a model that
            computes, only the shape counts.
        model: as in a configuration; default: layers that sleep.
        ranks: processes at the start.
        bounds: first partition, over the schedule's stages.
        settings: fields of the trainer's configuration besides, e.g. ``rebalance``.
        chunks: stages a rank where the schedule has several; the trainer's own jobs have two.
        speeds: of each rank: a layer takes its seconds over the speed of the rank that has it; empty: all 1.
        tracks_memory: whether ranks count the bytes of all tensors that they hold.
        replans: (after step, ranks kept, bounds): plans that follow one another.
    """

    loads: np.ndarray
    ranks: int
    bounds: tuple[int, ...]
    microbatches: int
    schedule: str = "1F1B"
    model: dict[str, Any] | None = None
    chunks: int = 2
    speeds: tuple[float, ...] = ()
    tracks_memory: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    replans: tuple[tuple[int, int, tuple[int, ...]], ...] = ()

    @property
    def config(self) -> JobConfig:
        """As the trainer reads it."""
        return JobConfig.from_mapping(
            {
                "totalSteps": len(self.loads),
                "model": self.model or {"name": "sleeping"},
                "pipeline": {
                    "schedule": self.schedule,
                    "microbatches": self.microbatches,
                    "globalBatchSize": self.microbatches,  # one sequence each
                },
                "rebalance": {"enabled": False},
                **self.settings,
            }
        )


class _Clock:
    """Sleeps; what it overslept, up to ten milliseconds, comes off its next sleeps.

    Timers are late by a part of a millisecond, and by more where other programs fill the machine.
    """

    owed = 0.0
    most = 0.01

    @classmethod
    def sleep_until(cls, end: float) -> None:
        """Until ``time.perf_counter()`` is ``end``, less what is owed."""
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

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.forward_seconds = self.backward_seconds = 0.0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Sleep and multiply."""
        # A forward that is repeated for the backward ends with the last tensor that it keeps.
        _Clock.sleep_until(time.perf_counter() + self.forward_seconds)
        # Once on the way to the input, once on the way to the weight.
        out: torch.Tensor = _Nap.apply(value, self) * _Nap.apply(self.weight, self)
        return out


class StatedLoads(UnchangedHooks):
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

    def conform(self, step: int, layers: LayerSet) -> None:
        """Layers that were built or received."""
        self._tell(min(step, len(self._loads) - 1), layers)

    def apply(self, step: int, layers: LayerSet, world: Any) -> bool:
        """Whether this step's loads are other ones."""
        self._tell(step, layers)
        return step > 0 and not np.array_equal(self._loads[step], self._loads[step - 1])


def sleeping_model(layers: int) -> Model:
    """As many sleeping layers."""

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


class TrackedMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that exist: each operation's results, until their storage goes.

    Attributes:
        most: bytes at the fullest moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._living: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation, and note its results."""
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._living:
            self._living.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._living.discard(key)
        self.now -= size


class Lines:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def step(self, **fields: Any) -> None:
        """A step is done."""
        self.lines.append(fields)

    def event(self, name: str, **fields: Any) -> None:
        """Something happened."""
        self.lines.append({"event": name, **fields})


class ScriptedChannel:
    """Publishes the job's plans one after the other, each once its step is reported."""

    def __init__(self, plan: Plan, replans: Any) -> None:
        self._lock = threading.Lock()
        self._plan = plan
        self._replans = list(replans)

    def read_plan(self) -> Plan:
        """The plan in force."""
        with self._lock:
            return self._plan

    def read_config(self) -> None:
        """The job has it."""
        return None

    def write(self, messages: Messages) -> None:
        """Switch to the next plan where its step is done."""
        report = messages.report
        with self._lock:
            if report is None or not self._replans or report.step < self._replans[0][0]:
                return
            _, ranks, bounds = self._replans.pop(0)
            shrinks = ranks < len(self._plan.ranks)
            self._plan = dataclasses.replace(
                self._plan,
                epoch=self._plan.epoch + 1,
                directive=Directive.SHRINK if shrinks else Directive.RUN,
                ranks=self._plan.ranks[:ranks],
                stages=stages(bounds, range(ranks)),
            )


@dataclasses.dataclass(frozen=True)
class Ran:
    """What rank 0 saw.

    Attributes:
        lines: of steps and of events.
        costs: of the layers, as measured last.
        overhead: seconds spent on deciding and moving.
        most_bytes: of the tensors of each rank, at the fullest moment; 0 where they were not tracked.
    """

    lines: list[dict[str, Any]]
    costs: LayerCosts
    overhead: Overhead
    most_bytes: tuple[int, ...] = ()

    def step_seconds(self) -> dict[int, float]:
        """By step, 1-based."""
        return {line["step"]: line["step_seconds"] for line in self.lines if "event" not in line}

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of a name."""
        return [line for line in self.lines if line.get("event") == name]


def stages(bounds: Any, placement: Any) -> tuple[Stage, ...]:
    """Stages with these bounds, each on its rank."""
    return tuple(
        Stage(rank=rank, first_layer=first, end_layer=end)
        for rank, (first, end) in zip(placement, itertools.pairwise(bounds), strict=True)
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
    training = TrainingState(
        config=config,
        model=model,
        device=device,
        speed=None,
        dynamics=(StatedLoads(job.loads, speed),) if job.model is None else (),
        layers=LayerSet(model, config.training, device, lambda index, module: module),
        meter=Meter(model.layer_count, device, None, clock=time.perf_counter if job.model is None else None),
        profile=Profile(model.layer_count),
        world=join(
            store=store,
            plan=plan,
            rank=rank,
            device=device,
            timeout_seconds=60,
            mesh=Mesh(data=config.parallelism.data),
        ),
        plan=plan,
        stages=(),
    )
    training.stages = stages(job.bounds, training.placement(job.ranks))
    channel_thread = ChannelThread(ScriptedChannel(plan, job.replans), plan) if rank == 0 else None
    lines = Lines()
    session = Session(
        training,
        channel_thread=channel_thread,
        reporter=lines if rank == 0 else SilentReporter(),
        stop=StopSignal(),
        peer_timeout_seconds=60,
    )
    session.run()
    return lines.lines, training.profile.costs(), training.overhead


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
