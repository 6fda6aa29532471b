"""From a configuration and a plan to a running session: what ``run`` and ``pod`` share."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from ballast_policies.contract import Plan
from ballast_policies.planning.stages import first_stages, usable_stages

from ballast_trainer.channel.base import Channel
from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.config import TrainerConfig
from ballast_trainer.distributed.heartbeat import RankHeartbeat
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import join
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.dynamics.registry import build_dynamics, find_dynamic
from ballast_trainer.environment import seconds_from
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.gpu_emulation import emulated_speed
from ballast_trainer.layers.layer_stack import LayerSet
from ballast_trainer.layers.precision import check_precision
from ballast_trainer.loop.rank_zero import SessionOutcome
from ballast_trainer.loop.reshape import announce_ready
from ballast_trainer.loop.session import Session
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import build_model
from ballast_trainer.pipeline.executor.check import check_execution, with_schedule_defaults
from ballast_trainer.pipeline.layout import check_schedule, placement_of
from ballast_trainer.pipeline.stages import preload
from ballast_trainer.profiling.profile import Meter, Profile
from ballast_trainer.profiling.recording import RecordingMeter, write_trace
from ballast_trainer.reporting.console import Reporter, SilentReporter
from ballast_trainer.reporting.writers import WritingReporter, writers_of
from ballast_trainer.tensor_parallel.check import check_tensor_parallel
from ballast_trainer.tensor_parallel.layers import split_layer

PEER_TIMEOUT_SECONDS = 120.0
"""How long a collective waits for another rank; the heartbeat sees a hung rank long before."""

HANG_SECONDS_ENV = "BALLAST_HANG_SECONDS"
"""Seconds without a heartbeat after which a rank counts as hung."""
HANG_SECONDS = 20.0
TRACED_STEPS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedJob:
    """A configuration that has been checked against the model it names."""

    config: TrainerConfig
    model: Model

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> "ValidatedJob":
        """Read and check.

        Raises:
            ConfigurationError: a field cannot work.
        """
        config = TrainerConfig.from_mapping(value)
        check_schedule(config.pipeline.schedule, config.pipeline.stages_per_rank)
        config = with_schedule_defaults(config, value)
        for dynamic in config.dynamics:
            find_dynamic(dynamic.kind)
        check_execution(config)
        model = build_model(config.model, config.data, seed=config.training.seed)
        build_dynamics(config.dynamics, model.layer_count, model.family)
        check_tensor_parallel(model, config)
        return cls(config=config, model=model)

    def check_ranks(self, ranks: int) -> None:
        """Refuse more ranks than layers.

        Raises:
            ConfigurationError: some rank would have no layer.
        """
        stages = len(self.placement(ranks))
        if stages > self.model.layer_count:
            count = self.model.layer_count
            reason = (
                f"{stages} stages need as many layers; {self.config.model.name!r} has {count}. "
                "To fix: fewer ranks, or model.layers"
            )
            raise ConfigurationError("pipeline.maxStages", reason)

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The pipeline position of each stage.

        Raises:
            ConfigurationError: the ranks and microbatches do not suit the schedule.
        """
        pipeline, parallelism = self.config.pipeline, self.config.parallelism
        return placement_of(
            pipeline.schedule,
            ranks=self.mesh.positions(ranks),
            microbatches=pipeline.microbatches // parallelism.data,
            replicas=pipeline.replicas,
            stages_per_rank=pipeline.stages_per_rank,
        )

    @property
    def mesh(self) -> Mesh:
        """How ranks are laid out."""
        return Mesh(tensor=self.config.parallelism.tensor, data=self.config.parallelism.data)


def choose_device(local_rank: int) -> torch.device:
    """A GPU of this process where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def train(
    job: ValidatedJob,
    *,
    plan: Plan,
    pod: str,
    store: Any,
    channel: Channel,
    reporter: Reporter,
    stop: StopSignal,
    local_rank: int = 0,
    joining: bool = False,
    lost: Callable[[str], None] | None = None,
    trace: Path | None = None,
    trace_step: int = 10,
) -> SessionOutcome:
    """Join the plan's ranks as ``pod`` and train to the end.

    Args:
        job: what to train.
        plan: the ranks.
        pod: this process among them.
        store: where ranks meet; None for one rank that never grows.
        channel: rank 0 talks to it.
        reporter: rank 0 prints through it.
        stop: whether SIGTERM came.
        local_rank: which GPU of the machine to use.
        joining: the plan grows a job that runs already, and this pod is new in it.
        lost: called on a thread of its own when a rank hangs; must end the process.
        trace: write what the ranks did in two steps here, as a chrome trace, when the run ends.
        trace_step: the first of them, 1-based.

    Raises:
        ConfigurationError: the plan has more ranks than the model has layers.
        PeerLost: another rank died, hung or never came.
        CheckpointError: a checkpoint cannot be written or fits another job.
    """
    rank = plan.rank_of(pod)
    if rank is None:
        raise ConfigurationError("plan.ranks", f"plan {plan.epoch} does not name {pod!r}")
    ranks = len(plan.ranks)
    job.check_ranks(ranks)
    config, model = job.config, job.model
    speed = emulated_speed(os.environ, model.family)
    hang_seconds = seconds_from(os.environ, HANG_SECONDS_ENV) or HANG_SECONDS
    device = choose_device(local_rank)
    check_precision(config.training.precision, device)
    written = WritingReporter(reporter, writers_of(config.metrics)) if rank == 0 else None
    if speed is not None:
        # The emulation counts one thread's CPU seconds.
        torch.set_num_threads(1)
    if ranks > 1:
        preload()
    if joining:
        announce_ready(store, plan, pod)
    world = join(
        store=store,
        plan=plan,
        rank=rank,
        device=device,
        timeout_seconds=PEER_TIMEOUT_SECONDS,
        mesh=job.mesh,
    )
    dynamics = build_dynamics(config.dynamics, model.layer_count, model.family)

    def prepare(index: int, module: torch.nn.Module) -> torch.nn.Module:
        for dynamic in dynamics:
            module = dynamic.prepare(index, module)
        return split_layer(module, world.tensor)

    placement = job.placement(ranks)
    stages = usable_stages(plan.stages, placement, model.layer_count) or first_stages(
        model.layer_count, placement, config.pipeline.replicas
    )
    meter = Meter(model.layer_count, device, speed)
    if trace is not None:
        meter = RecordingMeter(
            model.layer_count, device, speed, first_step=trace_step - 1, steps=TRACED_STEPS
        )
    training = TrainingState(
        config=config,
        model=model,
        device=device,
        speed=speed,
        dynamics=dynamics,
        layers=LayerSet(model, config.training, device, prepare),
        meter=meter,
        profile=Profile(model.layer_count),
        world=world,
        plan=plan,
        stages=stages,
    )
    training.meter.first_microbatch = world.data.index * training.microbatches
    channel_thread = ChannelThread(channel, plan) if rank == 0 else None
    heartbeat = None
    if store is not None and lost is not None:
        heartbeat = RankHeartbeat(store, pod=pod, hang_seconds=hang_seconds, lost=lost)
    session = Session(
        training,
        channel_thread=channel_thread,
        reporter=written or SilentReporter(),
        stop=stop,
        peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
        heartbeat=heartbeat,
    )
    try:
        outcome = session.run(joining=joining)
        if trace is not None and isinstance(meter, RecordingMeter):
            write_trace(trace, meter, rank=rank, ranks=ranks, store=store)
        return outcome
    finally:
        if heartbeat is not None:
            heartbeat.close()
        if channel_thread is not None:
            channel_thread.close()
        if written is not None:
            written.close()
