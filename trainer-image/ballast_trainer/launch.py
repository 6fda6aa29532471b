"""Launch of a rank: from a configuration and a plan to a training session."""

import contextlib
import dataclasses
import functools
import gc
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from ballast_policies.contract.decode import Unknown
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import RENEW_ENV, RENEW_SECONDS, Stage
from ballast_policies.contract.plan import Plan
from ballast_policies.planning.launch import first_stages, stages_over, usable_stages
from ballast_policies.planning.partition import Partition

from ballast_trainer.causes import describe
from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.checkpoints.export import check_export
from ballast_trainer.checkpoints.memory_copies import MemoryCopies, alone_on_their_pods
from ballast_trainer.config import read_job_config
from ballast_trainer.data.sources import ReplayedLoader, ShuffledDataset, is_read_in_order
from ballast_trainer.device import choose_device, threads_of_rank
from ballast_trainer.distributed.activity import Limit
from ballast_trainer.distributed.connections import check_connections
from ballast_trainer.distributed.heartbeat import HangLimits, RankHeartbeat
from ballast_trainer.distributed.joining import announce_ready, wait_until_called
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import join, told_once
from ballast_trainer.dynamics.mixture_of_experts import check_shared_experts, share_experts
from ballast_trainer.dynamics.registry import build_dynamics, check_dynamics, warn_without_effect
from ballast_trainer.environment import seconds_from
from ballast_trainer.errors import ConfigurationError, PeerLost
from ballast_trainer.gpu_emulation import emulated_speed
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.optimize import learning_rate
from ballast_trainer.layers.precision import LossScale, check_precision
from ballast_trainer.loop.in_place import InPlace
from ballast_trainer.loop.migrate import MigrationFailed
from ballast_trainer.loop.progress import SessionOutcome
from ballast_trainer.loop.rank_launch import RankLaunch, ties_key
from ballast_trainer.loop.session import Session
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.loop.validation_data import ValidationData, validation_data
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import build_model
from ballast_trainer.pipeline.layout import ScheduleRequest
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.recording import RecordingMeter, write_trace
from ballast_trainer.profiling.torch_profile import StepProfiler
from ballast_trainer.reporting.callback import CallingReporter
from ballast_trainer.reporting.console import Reporter, SilentReporter
from ballast_trainer.reporting.writers import WritingReporter, writers_of
from ballast_trainer.seeding import deterministic_kernels
from ballast_trainer.tensor_parallel.layers import check_tensor_parallel, split_layer
from ballast_trainer.tied_model import tied_model, with_ties

logger = logging.getLogger(__name__)

HANG_SECONDS_ENV = "BALLAST_HANG_SECONDS"
"""Seconds without a heartbeat after which a rank counts as hung."""
HANG_SECONDS = 20.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedJob:
    """A configuration that has been checked against the model it names."""

    config: JobConfig
    model: Model
    validation: ValidationData | None = None

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any], *, unknown: Unknown = "refuse") -> "ValidatedJob":
        """Read and check; ``unknown`` as of :func:`~ballast_trainer.config.read_job_config`.

        Raises:
            ConfigurationError: a field cannot work.
        """
        config = read_job_config(value, unknown=unknown)
        if config.model is None:
            raise ConfigurationError("model", "missing. To fix: name one, e.g. model: {name: gpt}")
        model = build_model(
            config.model,
            config.data,
            seed=config.training.seed,
            microbatches=config.pipeline.microbatches,
        )
        workers = config.training.dataloader_num_workers
        if workers and is_read_in_order(model.batch):
            raise ConfigurationError(
                "training.dataloaderNumWorkers",
                f"{workers}, and data.name gives a loader, which is read in its own order. "
                "To fix: 0, and num_workers of the loader itself",
            )
        _prepare_data(model, config)
        check_dynamics(model, config.dynamics)
        check_tensor_parallel(model, config)
        check_shared_experts(model, config)
        check_export(model, config.export, config.dynamics)
        learning_rate(config.training, 0, config.total_steps)
        return cls(config=config, model=model, validation=validation_data(config, model))

    def check_ranks(self, ranks: int, *, cut: bool = False) -> None:
        """Refuse more ranks than layers, and a plan of other layers or stages.

        ``cut``: their plan has its stages, of a gang that may have been launched with another number.

        Raises:
            ConfigurationError: some rank would have no layer, or ``plan`` is of another model or other ranks.
        """
        stages, plan = len(self.placement(ranks)), self.config.plan
        if plan is not None and (
            sum(plan.layers) != self.model.layer_count or (len(plan.layers) != stages and not cut)
        ):
            reason = (
                f"has {sum(plan.layers)} layers in {len(plan.layers)} stages; {self.config.model_name!r} has "
                f"{self.model.layer_count}, and {ranks} ranks have {stages} stages. "
                "To fix: a plan for these, or leave it out"
            )
            raise ConfigurationError("plan.layers", reason)
        if stages > self.model.layer_count:
            reason = (
                f"{stages} stages need as many layers; {self.config.model_name!r} has "
                f"{self.model.layer_count}. To fix: fewer ranks, or model.layers"
            )
            raise ConfigurationError("pipeline.maxStages", reason)

    def with_ties(self) -> "ValidatedJob":
        """The job with the model's tied weights; builds all layers one after the other, so one rank does it.

        Raises:
            ConfigurationError: something in the job cannot be right with them.
        """
        profiling, steps = self.config.profiling, self.config.total_steps
        warn_without_effect(self.config.dynamics, self.model.layer_count, steps)
        if profiling is not None and profiling.first_step > steps:
            first = profiling.first_step
            logger.warning("profiling traces nothing: firstStep %d, and the job has %d steps", first, steps)
        return dataclasses.replace(self, model=tied_model(self.model, self.config))

    def placement(self, ranks: int) -> tuple[int, ...]:
        """Pipeline position of each stage. Raises ConfigurationError: the schedule refuses the sizes."""
        return ScheduleRequest.of(self.config, self.mesh.positions(ranks)).placement()

    @property
    def mesh(self) -> Mesh:
        """Layout of the ranks."""
        return Mesh.of(self.config)


def _prepare_data(model: Model, config: JobConfig) -> None:
    """Tell the data how many samples may be left out, and their order.

    Raises:
        ConfigurationError: it does not know each.
    """
    most, source = config.training.skip_bad_samples, model.batch
    if config.training.group_by_length:
        if not isinstance(source, ShuffledDataset):
            reason = "the data have an order of their own. To fix: false, or a dataset with lengths"
            raise ConfigurationError("training.groupByLength", reason)
        source.group_by_length()
    if isinstance(source, ShuffledDataset | ReplayedLoader):
        source.bad.most = most
    elif most:
        raise ConfigurationError(
            "training.skipBadSamples",
            f"{most}, and the data are a function of whole batches. To fix: 0, or a dataset or a loader",
        )


def train(job: ValidatedJob, launch: RankLaunch) -> SessionOutcome:
    """Join the plan's ranks and train to the end.

    Raises:
        ConfigurationError: the plan has more ranks than the model has layers.
        PeerLost: another rank died, hung or never came.
        CheckpointError: a checkpoint cannot be written or fits another job.
    """
    job.check_ranks(len(launch.plan.ranks), cut=bool(launch.plan.stages))
    process = _Process(job, launch)
    with deterministic_kernels() if job.config.training.deterministic else contextlib.nullcontext():
        return process.run()


class _Process:
    """This process under its plans, one after the other; see :func:`train`."""

    def __init__(self, job: ValidatedJob, launch: RankLaunch) -> None:
        self._job, self._launch = job, launch
        self._speed = emulated_speed(os.environ, job.model.family)
        self._device = choose_device(launch.local_rank, launch.local_ranks, launch.device)
        ranks, locally = len(launch.plan.ranks), launch.local_ranks
        threads = threads_of_rank(self._device, ranks=ranks, local_ranks=locally, environment=os.environ)
        if self._speed is not None:
            # The emulation counts one thread's CPU seconds.
            threads = 1
        if threads is not None:
            torch.set_num_threads(threads)
        check_precision(job.config.training.precision, self._device)
        self._in_place = self._going_on()
        # Of all plans: a tracker's run does not end where another rank is lost.
        self._written: WritingReporter | None = None
        self._heartbeat: RankHeartbeat | None = None
        if launch.lost is not None:
            self._heartbeat = RankHeartbeat(
                launch.store,
                process=launch.process,
                limits=HangLimits(
                    hang_seconds=seconds_from(os.environ, HANG_SECONDS_ENV) or HANG_SECONDS,
                    busy_seconds=Limit.seconds_of(job.config),
                    kills=launch.restarts is None,
                    torch_raises=self._device.type != "cuda",
                ),
                lost=launch.lost,
                survivors=None if self._in_place is None else self._in_place.survivors,
            )
        if self._in_place is not None:
            self._in_place.heartbeat = self._heartbeat

    def _going_on(self) -> InPlace | None:
        """Recovery of this rank in place where others are lost; None: it has none, or it is alone.

        Raises:
            ConfigurationError: the job asks for it, and it cannot be.
        """
        job, launch = self._job, self._launch
        field, every = "checkpoint.inMemoryEverySteps", job.config.checkpoint.in_memory_every_steps
        if not every:
            return None
        if launch.store is None:
            logger.warning("%s has no effect: one rank has no other to copy its state to", field)
            return None
        if launch.regrouped is None and launch.restarts is None:
            where = "under ballast-train run --ranks or in a TrainingJob"
            raise ConfigurationError(field, f"{every}, and ranks go on in place {where}. To fix: 0")
        if self._device.type == "cuda":
            raise ConfigurationError(
                field,
                f"{every}, and ranks on GPUs talk by NCCL, which cannot begin anew in place so far. "
                "To fix: 0, or --device cpu",
            )
        # A gang in pods may grow.
        alone = None if launch.regrouped is None else alone_on_their_pods(job.mesh.column, launch.plan)
        if alone is not None:
            raise ConfigurationError(field, f"{every}, and {alone}. To fix: 0, or more ranks")
        check_connections(field)
        return InPlace(MemoryCopies(every, self._device), launch, job.config)

    def run(self) -> SessionOutcome:
        """Train to the end: by the launch's plan, and by those of the ranks that are left after a loss."""
        in_place = self._in_place
        try:
            if in_place is None:
                with contextlib.ExitStack() as closing:
                    return self._train(closing)
            if self._launch.restarts:
                self._follow(in_place.come_back(self._launch.plan), in_place)
            while True:
                try:
                    with contextlib.ExitStack() as closing:
                        outcome = in_place.attempt(functools.partial(self._train, closing))
                    in_place.survivors.leave()
                    return outcome
                except PeerLost as error:
                    self._follow(in_place.next_plan(self._launch.plan, error), in_place)
                except MigrationFailed as error:
                    # Of a rank that joins: the others train on as before.
                    raise PeerLost(f"this rank cannot take over layers: {describe(error)}") from error
                except BaseException as error:
                    in_place.none_goes_on(error)
                    raise
                # The layers of before are in the frames of the error.
                gc.collect()
        finally:
            if self._written is not None:
                self._written.close()
            heartbeat = self._heartbeat if in_place is None else in_place.heartbeat
            if heartbeat is not None:
                heartbeat.close()

    def _follow(self, plan: Plan, in_place: InPlace) -> None:
        self._launch = dataclasses.replace(self._launch, plan=plan, store=in_place.store, joining=False)
        self._heartbeat = in_place.heartbeat
        if in_place.model is not None:
            # Its ties are known by now.
            self._job = dataclasses.replace(self._job, model=in_place.definition)

    def _train(self, closing: contextlib.ExitStack) -> SessionOutcome:
        """Join the plan's ranks and train, until a rank is lost; what ``closing`` gets ends with that."""
        job, plan, rank = self._job, self._launch.plan, self._launch.rank
        in_place, trace, device = self._in_place, self._launch.trace, self._device
        if rank != 0:
            # Rank 0 tells the others of later plans.
            self._launch.channel.close()
        chosen: Reporter = SilentReporter()
        if rank == 0:
            if self._written is None:
                writers = writers_of(job.config.metrics, job.config.to_dict())
                self._written = WritingReporter(self._launch.reporter, writers)
            chosen = self._written
        callback = job.config.callback
        if callback is not None and (callback.every_rank or rank == 0):
            chosen = CallingReporter(chosen, callback)
        run = RunState(plan=plan, loss_scale=LossScale(job.config.training.precision))
        model = self._model_state(run.loss_scale)
        closing.callback(model.batches.close)
        if in_place is not None:
            in_place.model, in_place.run = model, run
        channel_thread = None
        if rank == 0:
            renew_seconds = seconds_from(os.environ, RENEW_ENV) or RENEW_SECONDS
            channel_thread = ChannelThread(
                self._launch.channel, plan, renew_seconds=renew_seconds, stop=self._launch.stop
            )
            # Of ranks that may go on at once the Lease stays theirs.
            closing.push(
                lambda kind, *_: channel_thread.close(closing=in_place is None or kind is not PeerLost)
            )
        profiler = StepProfiler(job.config.profiling, rank=rank, device=device)
        closing.enter_context(profiler.on_out_of_memory())
        session = Session(
            model,
            run,
            channel_thread=channel_thread,
            reporter=chosen,
            stop=self._launch.stop,
            heartbeat=self._heartbeat,
            in_place=in_place,
            profiler=profiler,
        )
        closing.callback(session.close)
        outcome = session.run(joining=self._launch.joining)
        if trace is not None and isinstance(model.meter, RecordingMeter):
            ranks, store = len(plan.ranks), self._launch.store
            write_trace(trace.path, model.meter, rank=rank, ranks=ranks, store=store)
        return outcome

    def _meter(self) -> Meter:
        layers, device, trace = self._job.model.layer_count, self._device, self._launch.trace
        if trace is None:
            return Meter(layers, device, self._speed)
        return RecordingMeter(layers, device, self._speed, first_step=trace.first_step - 1)

    def _model_state(self, loss_scale: LossScale) -> ModelState:
        """Join the process group, and the model before its layers are made; collective over the ranks."""
        job, launch, device = self._job, self._launch, self._device
        config, plan, model = (
            job.config,
            launch.plan,
            _shared_ties(job.model, launch, job.config.training.seed),
        )
        if launch.joining:
            announce_ready(launch.store, plan, launch.process)
            logger.info("%s waits to be called by the ranks that train", launch.process)
            wait_until_called(launch.store, plan, launch.process, launch.stop)
        if self._in_place is not None:
            self._in_place.survivors.enter([rank.process for rank in plan.ranks])
        world = join(
            store=launch.store,
            plan=plan,
            rank=launch.rank,
            device=device,
            timeout_seconds=max(Limit.seconds_of(config).values()),
            mesh=job.mesh,
        )
        dynamics = build_dynamics(config.dynamics, model.layer_count, model.family)

        def prepare(index: int, module: torch.nn.Module) -> torch.nn.Module:
            for dynamic in dynamics:
                module = dynamic.prepare(index, module)
            return share_experts(split_layer(module, world.tensor), world.data)

        return ModelState(
            config=config,
            definition=model,
            device=device,
            speed=self._speed,
            dynamics=dynamics,
            layers=LayerSet(
                model,
                config.training,
                device,
                prepare,
                replicas=world.data if config.parallelism.zero_stage else None,
                shards_weights=config.parallelism.weight_shares > 1,
            ),
            meter=self._meter(),
            world=world,
            validation=job.validation,
            stages=_launched_stages(job, plan, job.placement(len(plan.ranks))),
            loss=loss_scale.scaled(model.loss),
        )


def _shared_ties(model: Model, launch: RankLaunch, seed: int) -> Model:
    """The model with the ties that rank 0 has found as the job was launched; rank 0 has them already.

    Raises:
        PeerLost: that rank is gone.
    """
    if launch.store is None:
        return model
    tells = launch.rank == 0 and not launch.joining
    ties = told_once(launch.store, ties_key(launch.plan), model.tied, tells=tells)
    return model if ties is model.tied else with_ties(model, ties, seed=seed)


def _launched_stages(job: ValidatedJob, plan: Plan, placement: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages that the ranks' plan asks for, else those of the configuration's, else even ones.

    Raises:
        ConfigurationError: those asked for are not of this model, or not on the ranks of the schedule.
    """
    layers, config = job.model.layer_count, job.config
    if plan.stages:
        asked = usable_stages(plan.stages, placement, layers)
        if asked is None:
            ranks = [stage.rank for stage in plan.stages]
            raise ConfigurationError(
                "plan.stages",
                f"plan {plan.epoch} has {plan.stages[-1].end_layer} layers on ranks {ranks}; "
                f"{config.model_name!r} has {layers}, which {config.pipeline.schedule} has on ranks "
                f"{list(placement)}. To fix: model.layers, and the operator's version",
            )
        return asked
    if config.plan is not None:
        return stages_over(Partition(bounds=config.plan.bounds), placement)
    return first_stages(layers, placement, config.pipeline.replicas)
