"""The state of a training job on one rank."""

import dataclasses
import logging

import torch
from ballast_policies.contract import Plan, Stage
from ballast_policies.contract.job import JobConfig, StragglerPolicy

from ballast_trainer.data.batch import Batch
from ballast_trainer.data.read_ahead import ReadAhead
from ballast_trainer.data.sources import (
    LoaderPosition,
    ReplayedLoader,
    ShuffledDataset,
    has_one_shape,
    is_read_in_order,
    read_batch,
)
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.freezing import Freezing, frozen_layers
from ballast_trainer.dynamics.protocol import Dynamic, is_built_in
from ballast_trainer.evaluation.validation_data import ValidationData
from ballast_trainer.gpu_emulation import EmulatedSpeed
from ballast_trainer.layers.frozen_outputs import FrozenOutputs
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.precision import LossScale
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.layers.tied_messages import gather_gradients, send_weights
from ballast_trainer.models.loss_weights import weighted, weights_of
from ballast_trainer.models.protocol import Model
from ballast_trainer.pipeline.executor.drains import steps_between_drains
from ballast_trainer.pipeline.gradients import GradientBuckets
from ballast_trainer.pipeline.layout import ScheduleRequest, holders_of, is_asynchronous
from ballast_trainer.pipeline.partition_cache import PartitionCache
from ballast_trainer.pipeline.stages import Boundaries, Pipeline, PipelineBuilder
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.profile import LayerCosts, Profile
from ballast_trainer.profiling.rank_speeds import RankSpeeds, SpeedProbe
from ballast_trainer.tensor_parallel.straggler_mitigation import StragglerMitigation

logger = logging.getLogger(__name__)

_KEPT_TARGETS = 4
"""Steps whose targets are kept: without a flush, several are in flight."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Overhead:
    """Seconds of this rank, since it began, in which it reshaped instead of training.

    Attributes:
        deciding: deciding on a rebalance, including the wait for rank 0's decision.
        moving: layers moved and pipelines rebuilt.
    """

    deciding: float = 0.0
    moving: float = 0.0


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainingState:
    """The running job on this rank.

    Attributes:
        stages: the partition in force, ranks in the world's numbering.
        validation: what evaluations measure the loss on; None: there are none.
        step: optimizer steps done, which is the index of the next step.
        pipeline: runs the stages; rebuilt by :meth:`rebuild`.
        checkpoint_step: of the newest checkpoint; None: there is none.
        save_again_at: the step after which a checkpoint that failed is tried again; None: none failed.
        loss_scale: the factor on the loss; 1 unless the precision is fp16.
        balance: straggler mitigation of this rank's tensor group.
        rank_speeds: how fast the pipeline positions are, apart from what their layers cost.
        partition_cache: what trials have shown of the layers; the same on every rank.
        exchange_due: some rank wants its tensor group to exchange times before the next step.
        overhead: seconds spent on rebalancing.
    """

    config: JobConfig
    model: Model
    device: torch.device
    speed: EmulatedSpeed | None
    dynamics: tuple[Dynamic, ...]
    layers: LayerSet
    meter: Meter
    profile: Profile
    world: World
    plan: Plan
    stages: tuple[Stage, ...]
    validation: ValidationData | None = None
    step: int = 0
    checkpoint_step: int | None = None
    save_again_at: int | None = None
    pipeline: Pipeline | None = None
    loss_scale: LossScale = dataclasses.field(init=False)
    straggler_mitigation: StragglerMitigation = dataclasses.field(init=False)
    exchange_due: bool = False
    rank_speeds: RankSpeeds = dataclasses.field(default_factory=RankSpeeds)
    partition_cache: PartitionCache = dataclasses.field(default_factory=PartitionCache)
    _probe: SpeedProbe | None = None
    _targets: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    _factors: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    _ahead: ReadAhead | None = None
    _newest: tuple[tuple[int, int, int], Batch] | None = None
    _shape: tuple[int, ...] | None = None  # of the inputs that the pipeline is for; None: any
    _pipelines: dict[tuple[int, ...] | None, Pipeline] = dataclasses.field(default_factory=dict)
    _buckets: GradientBuckets | None = None

    def __post_init__(self) -> None:
        # A tensor group compares how long its ranks are busy.
        self.meter.always_busy = self.config.parallelism.tensor > 1
        CURRENT_FORWARD.targets_of = self.targets_of
        if self.config.training.dataloader_num_workers > 0:
            self._ahead = ReadAhead(
                self._read,
                workers=self.config.training.dataloader_num_workers,
                last_step=self.config.total_steps,
                pinned=self.device.type == "cuda",
                told=lambda: dict(self.bad_samples),
            )
        self.loss_scale = LossScale(self.config.training.precision)
        self.straggler_mitigation = StragglerMitigation(
            self.config.parallelism.stragglers, self.device, self.speed, seed=self.config.training.seed
        )

    overhead: Overhead = dataclasses.field(default_factory=Overhead)

    @property
    def frozen_outputs(self) -> FrozenOutputs | None:
        """Where outputs of frozen layers are kept; None: they are not."""
        kept = [dynamic.outputs for dynamic in self.dynamics if isinstance(dynamic, Freezing)]
        return kept[0] if kept else None

    def train_pipeline(self) -> float | None:
        """Forward and backward of the next step; the mean loss on the rank of the last stage."""
        assert self.pipeline is not None
        self._buckets = GradientBuckets(
            self.world.data, self.layers, self.microbatches, each_backward=self._shards_gradients
        )
        if self.frozen_outputs is None and not is_read_in_order(self.model.batch):
            return self.pipeline.run(self.batch)
        # On every rank: one that did not read along with a loader would have to read all steps again later.
        batch = self.batch()
        if self.frozen_outputs is None:
            return self.pipeline.run(lambda: batch)
        with self.frozen_outputs.during(batch[0], self.microbatches):
            return self.pipeline.run(lambda: batch)

    @property
    def bad_samples(self) -> dict[int, str]:
        """By number, samples (of a loader: batches) that cannot be read and are left out, and why."""
        source = self.model.batch
        return source.bad.known if isinstance(source, ShuffledDataset | ReplayedLoader) else {}

    def prepare_data(self) -> None:
        """Agree on the next step's samples, and take the pipeline for the shape of its inputs; collective.

        A shape that is new is tried like a new partition.

        Raises:
            TrialFailed: a stage cannot run it.
            DataError: more cannot be read than may be left out.
        """
        source = self.model.batch
        if isinstance(source, ShuffledDataset | ReplayedLoader) and source.bad.most and self.world.size > 1:
            while True:
                if self._reads:
                    self.batch()
                if not source.agree(self.world.gather(source.told(), patient=True)):
                    break
                self._newest = None
        shape = self._next_shape()
        if shape in (None, self._shape):
            return
        self._shape = shape
        if shape not in self._pipelines:
            self.meter.start_step(self.step)
            builder, cache = self._builder(self.stages, self.world.positions), PartitionCache()
            boundaries = builder.probe_partition(self.batch, self.world.gather, known=cache)
            self._pipelines[shape] = builder.build(boundaries)
        self.pipeline = self._pipelines[shape]

    def _next_shape(self) -> tuple[int, ...] | None:
        """Of the next step's inputs, the same on all ranks; None: one rank runs any, or all have one shape.

        Without a flush several steps are in flight, whose messages have one shape.
        """
        own_data = self.config.data is not None and not has_one_shape(self.model.batch)
        if self.world.positions == 1 or not own_data or is_asynchronous(self.config.pipeline.schedule):
            return None
        shape = tuple(self.batch()[0].shape) if self.world.rank == 0 or self._reads else None
        if not is_read_in_order(self.model.batch):
            shape = self.world.from_rank_0(shape, patient=True)
        return shape

    @property
    def _reads(self) -> bool:
        """Whether this rank's stages need the data, or it has to read along."""
        ends = self.holders[0] + self.holders[-1]
        return self.world.position in ends or is_read_in_order(self.model.batch)

    def probe_seconds(self) -> list[float]:
        """By pipeline position, seconds of the same work in a step measured by layer; 0 for the others."""
        seconds = [0.0] * self.world.positions
        if self.config.rebalance.enabled and self.meter.by_layer and self.meter.compares_ranks:
            self._probe = self._probe or SpeedProbe(self.meter, self.device)
            seconds[self.world.position] = self._probe.seconds()
        return seconds

    def apply_dynamics(self) -> None:
        """Apply the changes of the dynamic cases up to this step to all layers held."""
        for dynamic in self.dynamics:
            dynamic.conform(self.step, self.layers)

    def rebuild(self, boundaries: Boundaries | None = None) -> None:
        """Rebuild the pipeline after layers moved or froze; collective.

        Args:
            boundaries: result of a trial of the partition in force; None: it is tried now.

        Raises:
            TrialFailed: a stage cannot run.
        """
        if self.frozen_outputs is not None:
            self.frozen_outputs.keep_only(frozen_layers(self.layers))
        if boundaries is None:
            self.partition_cache.forget()
        builder = self._builder(self.stages, self.world.positions)
        self.pipeline = builder.build(self.probe_partition(self.stages) if boundaries is None else boundaries)
        self._shape = self.partition_cache.shape
        self._pipelines = {self._shape: self.pipeline}
        self.meter.start_step(self.step)

    def probe_partition(
        self,
        stages: tuple[Stage, ...],
        positions: int | None = None,
        *,
        in_force: tuple[Stage, ...] | None = None,
        joined: frozenset[int] = frozenset(),
    ) -> Boundaries:
        """Try a partition of the layers held, which need not be in force; collective over the world.

        Args:
            stages: with ranks in the numbering of today.
            positions: of the pipeline that is to run them; None: unchanged.
            in_force: the partition that the ranks run: what is known need not run again.
            joined: pipeline positions of ranks that are new and have run nothing.

        Raises:
            TrialFailed: on every rank; a stage cannot run.
        """
        alone = (positions or self.world.positions) == 1 and self.world.size == 1
        if alone and not self.config.training.recompute:
            return ()
        self.meter.start_step(self.step)
        self.partition_cache.of_inputs(self._next_shape())
        builder = self._builder(stages, positions or self.world.positions)
        return builder.probe_partition(
            self.batch, self.world.gather, known=self.partition_cache, in_force=in_force, joined=joined
        )

    def _builder(self, stages: tuple[Stage, ...], positions: int) -> PipelineBuilder:
        return PipelineBuilder(
            stages=stages,
            schedule=self.schedule_request(positions),
            rank=self.world.position,
            line=self.world.pipeline,
            lines=self.world.mesh.lines("position", self.world.size),
            tensor=self.world.tensor if self.config.parallelism.scatter_gather else None,
            layers=self.layers,
            meter=self.meter,
            loss=self._loss,
            independent_layers=self.model.independent_layers and all(map(is_built_in, self.dynamics)),
            frozen_outputs=self.frozen_outputs,
            # Every schedule takes microbatches in order.
            layer_ended=(0 if self._shards_gradients else self.microbatches - 1, self._layer_ended)
            if self._reduces_early
            else None,
        )

    @property
    def _shards_gradients(self) -> bool:
        return self.config.parallelism.gradient_shares > 1

    @property
    def _reduces_early(self) -> bool:
        """Whether nothing but backwards adds to gradients, or talks to the replicas while these run."""
        tensor, stragglers = self.config.parallelism.tensor, self.config.parallelism.stragglers
        experts = (change.experts for change in self.config.dynamics)
        return (
            self.world.data.size > 1
            and (tensor == 1 or stragglers.policy is StragglerPolicy.NONE)
            and not any(of is not None and of.parallel for of in experts)
        )

    def _layer_ended(self, index: int) -> None:
        if self._buckets is not None:
            self._buckets.layer_ended(index)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each replica of the pipeline."""
        return self.config.pipeline.microbatches // self.world.data.size

    @property
    def microbatches_per_drain(self) -> int:
        """Microbatches that share one filling and draining of the pipeline: a step's, or a run's."""
        return self.microbatches * steps_between_drains(self.config)

    def batch(self) -> Batch:
        """Inputs and targets of the next step: this replica's microbatches of them."""
        return self.batch_of(self.step)

    def batch_of(self, step: int) -> Batch:
        """Inputs and targets of ``step``: this replica's microbatches of them."""
        key = step, self.world.data.index, self.world.data.size
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._moved(step)
        return self._newest[1]

    def _moved(self, step: int) -> Batch:
        with ACTIVITY.doing(f"the batch of step {step + 1}"):
            inputs, targets = self._read(step) if self._ahead is None else self._read_ahead(step, self._ahead)
        size = self.config.pipeline.global_batch_size
        share = size // self.world.data.size
        mine = slice(self.world.data.index * share, (self.world.data.index + 1) * share)
        pinned = self._ahead is not None
        there = targets[mine].to(self.device, non_blocking=pinned)
        self._targets[step] = there
        for old in sorted(self._targets)[:-_KEPT_TARGETS]:
            del self._targets[old]
            self._factors.pop(old, None)
        self._factors[step] = self._factors_of(step, targets)
        return inputs[mine].to(self.device, non_blocking=pinned), there

    def _read_ahead(self, step: int, ahead: ReadAhead) -> Batch:
        """The batch that a worker has read, unless it has a sample that others could not read."""
        batch, known = ahead.batch(step)
        source = self.model.batch
        if isinstance(source, ShuffledDataset) and (known or source.bad.known):
            source.bad.add(known)
            which = self.config.training.seed, step, self.config.pipeline.global_batch_size
            if source.chosen(*which, source.bad.known) != source.chosen(*which, known):
                return self._read(step)
        return batch

    def _read(self, step: int) -> Batch:
        """The whole batch of a step."""
        data = self.config.data
        return read_batch(
            self.model.batch,
            self.config.training.seed,
            step,
            self.config.pipeline.global_batch_size,
            field="model.name" if data is None else "data.name",
            name=self.config.model_name if data is None else data.name,
            what=f"the batch of step {step + 1}",
        )

    def data_position(self) -> str:
        """Where the data's loader is before the next step, by its own account; empty: it has none.

        Raises:
            ConfigurationError: it cannot be saved.
        """
        loader = self.model.batch
        if not isinstance(loader, ReplayedLoader):
            return ""
        position = loader.position(self.config.training.seed, self.step)
        return "" if position is None else position.to_text()

    def continue_data(self, position: str) -> None:
        """Continue reading before the next step, where :meth:`data_position` of another process was."""
        if position and isinstance(self.model.batch, ReplayedLoader):
            known = LoaderPosition.from_text(self.step, position)
            self.model.batch.continue_from(self.config.training.seed, known)

    def release(self) -> None:
        """Let go of the layers; what was measured of them stays."""
        self.layers.drop(self.layers.indices())
        self.pipeline, self._buckets, self._newest = None, None, None
        self._pipelines.clear()

    def close(self) -> None:
        """End the processes that read data."""
        if self._ahead is not None:
            self._ahead.close()

    def _factors_of(self, step: int, targets: torch.Tensor) -> list[float]:
        """By microbatch of this replica, the factor of its mean loss, from the targets of all replicas."""
        weights = weights_of(self.model.loss_weight, targets, self.config.pipeline.microbatches)
        total = sum(weights)
        if total <= 0 and self.world.rank == 0 and step not in self._factors:
            logger.warning(
                "the batch of step %d has no target that counts: its loss and its gradients are 0. "
                "To fix: leave such samples out of the data",
                step + 1,
            )
        first = self.world.data.index * self.microbatches
        mine = weights[first : first + self.microbatches]
        return [weight * len(weights) / total if total > 0 else 0.0 for weight in mine]

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of the microbatch whose forward has just ended, weighted by its targets."""
        value = self.loss_scale.scaled(self.model.loss)(output, target)
        if CURRENT_FORWARD.microbatch is None or self.model.loss_weight is None:
            return value
        if CURRENT_FORWARD.step not in self._factors:
            self.batch_of(CURRENT_FORWARD.step)
        return weighted(value, output, self._factors[CURRENT_FORWARD.step][CURRENT_FORWARD.microbatch])

    def complete_gradients(self) -> None:
        """Average over the replicas, and sum those of tied weights on the ranks that own them; collective."""
        buckets, self._buckets = self._buckets or GradientBuckets(self.world.data, self.layers), None
        buckets.finish()
        gather_gradients(self.model.tied, self.world, self.layers, self._layer_holders)

    def send_tied_weights(self) -> None:
        """Give tied weights from their owners to their copies; collective."""
        send_weights(self.model.tied, self.world, self.layers, self._layer_holders)

    @property
    def _layer_holders(self) -> list[tuple[int, ...]]:
        pairs = zip(self.stages, self.holders, strict=True)
        return [of for stage, of in pairs for _ in range(stage.first_layer, stage.end_layer)]

    def targets_of(self, step: int) -> tuple[torch.Tensor, ...]:
        """Targets of this replica's microbatches of ``step``; those of the newest few steps are kept."""
        if step not in self._targets:
            self.batch_of(step)
        return self._targets[step].chunk(self.microbatches)

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The pipeline position of each stage, for ``ranks`` ranks over all axes of the mesh."""
        return self.schedule_request(self.world.mesh.positions(ranks)).placement()

    def schedule_request(self, positions: int) -> ScheduleRequest:
        """The job's schedule over ``positions`` positions of the pipeline."""
        request = ScheduleRequest.of(self.config, positions)
        return dataclasses.replace(request, microbatches=self.microbatches)

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """By stage, the pipeline positions that hold it: several where the stage has replicas."""
        return self._holders_of(self.stages)

    def _holders_of(self, stages: tuple[Stage, ...]) -> tuple[tuple[int, ...], ...]:
        return holders_of(stages, self.config.pipeline.replicas, self.world.positions)

    @property
    def copies(self) -> int:
        """How many positions hold the layers that this one holds."""
        return max(len(holders) for holders in self.holders if self.world.position in holders)

    def held_layers(self, stages: tuple[Stage, ...] | None = None) -> list[int]:
        """The layers that this rank holds under ``stages``, by default those in force."""
        stages = self.stages if stages is None else stages
        return [
            layer
            for stage, holders in zip(stages, self._holders_of(stages), strict=True)
            if self.world.position in holders
            for layer in range(stage.first_layer, stage.end_layer)
        ]

    def rank_loads(self, costs: LayerCosts) -> list[float]:
        """Seconds per step of each pipeline position under the partition in force."""
        total = costs.total
        loads = [0.0] * self.world.positions
        for stage, holders in zip(self.stages, self.holders, strict=True):
            for position in holders:
                loads[position] += sum(total[stage.first_layer : stage.end_layer]) / len(holders)
        return loads
