"""State of a run: the model on its ranks, and the steps, plan and checkpoint so far."""

import dataclasses

import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import StragglerPolicy
from ballast_policies.contract.messages import Stage
from ballast_policies.contract.plan import Plan
from torch import nn

from ballast_trainer.data.collate import Batch
from ballast_trainer.data.sources import has_one_shape, is_read_in_order
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.freezing import Freezing, frozen_layers
from ballast_trainer.dynamics.protocol import Dynamic, is_built_in
from ballast_trainer.gpu_emulation import EmulatedSpeed
from ballast_trainer.layers.buffers import Attributes, in_place_of_loss
from ballast_trainer.layers.frozen_outputs import FrozenOutputs
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.optimize import drop_gradients, optimizer_step
from ballast_trainer.layers.precision import Loss, LossScale
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.layers.tied_messages import gather_gradients, send_weights
from ballast_trainer.loop.batches import Batches
from ballast_trainer.loop.validation_data import ValidationData
from ballast_trainer.models.loss_weights import weighted
from ballast_trainer.models.protocol import Model
from ballast_trainer.pipeline.executor.pipelines import ExecutedPipeline
from ballast_trainer.pipeline.gradients import GradientBuckets, gather_weights
from ballast_trainer.pipeline.layout import ScheduleRequest, holders_of, is_asynchronous, steps_between_drains
from ballast_trainer.pipeline.stages import Boundaries, PipelineBuilder
from ballast_trainer.pipeline.trial import PartitionCache, Shapes, refuse_sparse_gradients
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.profile import LayerCosts, Profile
from ballast_trainer.profiling.rank_speeds import RankSpeeds, SpeedProbe
from ballast_trainer.tensor_parallel.straggler_mitigation import StragglerMitigation
from ballast_trainer.trees import tensors_of


@dataclasses.dataclass(slots=True, kw_only=True)
class RunState:
    """Progress and plan of the run, the same on every rank.

    Attributes:
        plan: in force.
        loss_scale: the factor on the loss; 1 unless the precision is fp16.
        step: optimizer steps done, which is the index of the next step.
        checkpoint_step: of the newest checkpoint; None: there is none.
        save_again_at: the step after which a checkpoint that failed is tried again; None: none failed.
    """

    plan: Plan
    loss_scale: LossScale
    step: int = 0
    checkpoint_step: int | None = None
    save_again_at: int | None = None

    def continue_from(
        self,
        step: int,
        loss_scale: tuple[float, int],
        checkpoint_step: int | None,
        save_again_at: int | None = None,
    ) -> None:
        """Continue where another process was: the one that wrote a checkpoint, or a rank of the job."""
        self.step, self.checkpoint_step, self.save_again_at = step, checkpoint_step, save_again_at
        self.loss_scale.restore(loss_scale)


@dataclasses.dataclass(slots=True, kw_only=True)
class ModelState:
    """The model as it is trained on this rank: its layers, the stages that they form, the ranks of these.

    Attributes:
        definition: what the layers, the loss and the data are.
        stages: the partition in force, ranks in the world's numbering.
        validation: what evaluations measure the loss on; None: there are none.
        loss: of a microbatch, multiplied by the loss scale.
        pipeline: runs the stages; rebuilt by :meth:`rebuild`.
        straggler_mitigation: of this rank's tensor group.
        rank_speeds: how fast the ranks are, apart from what their layers cost.
        partition_cache: what trials have shown of the layers; the same on every rank.
        untried: attributes of the layers of one rank, which are not tried, before the next step.
    """

    config: JobConfig
    definition: Model
    device: torch.device
    dynamics: tuple[Dynamic, ...]
    layers: LayerSet
    meter: Meter
    world: World
    stages: tuple[Stage, ...]
    loss: Loss
    speed: EmulatedSpeed | None = None
    validation: ValidationData | None = None
    pipeline: ExecutedPipeline | None = None
    profile: Profile = dataclasses.field(init=False)
    batches: Batches = dataclasses.field(init=False)
    straggler_mitigation: StragglerMitigation = dataclasses.field(init=False)
    rank_speeds: RankSpeeds = dataclasses.field(default_factory=RankSpeeds)
    partition_cache: PartitionCache = dataclasses.field(default_factory=PartitionCache)
    untried: Attributes | None = None
    _probe: SpeedProbe | None = None
    _shape: Shapes | None = None  # of the inputs that the pipeline is for; None: any
    _pipelines: dict[Shapes | None, ExecutedPipeline] = dataclasses.field(default_factory=dict)
    _buckets: GradientBuckets | None = None

    def __post_init__(self) -> None:
        # A tensor group compares how long its ranks are busy.
        self.meter.always_busy = self.config.parallelism.tensor > 1
        self.meter.first_microbatch = self.world.data.index * self.microbatches
        CURRENT_FORWARD.targets_of = lambda step: self.batches.targets(step, self.world)
        for score in (self.definition.loss, *self.definition.metrics.values()):
            if isinstance(score, nn.Module):
                score.to(self.device)
        self.profile = Profile(self.definition.layer_count)
        self.batches = Batches(self.config, self.definition, self.device)
        self.straggler_mitigation = StragglerMitigation(
            self.config.parallelism.stragglers, self.device, self.speed, seed=self.config.training.seed
        )

    @property
    def frozen_outputs(self) -> FrozenOutputs | None:
        """Outputs of frozen layers that are kept; None: none are."""
        kept = [dynamic.outputs for dynamic in self.dynamics if isinstance(dynamic, Freezing)]
        return kept[0] if kept else None

    def train_pipeline(self, step: int) -> float | None:
        """Forward and backward of ``step``; the mean loss on the rank of the last stage."""
        assert self.pipeline is not None
        self._buckets = GradientBuckets(self.world.data, self.layers, each_backward=self._shards_gradients)
        if is_read_in_order(self.definition.batch):
            # On every rank: one that did not read along would have to read all steps again later.
            self.batch(step)
        if self.frozen_outputs is None:
            return self.pipeline.run(lambda: self.batch(step))
        with self.frozen_outputs.during(self.batches.inputs_on_host(step, self.world), self.microbatches):
            return self.pipeline.run(lambda: self.batch(step))

    def prepare_data(self, step: int) -> None:
        """Agree on the samples of ``step``, and take the pipeline for the shape of its inputs; collective.

        A shape that is new is tried like a new partition.

        Raises:
            TrialFailed: a stage cannot run it.
            DataError: more cannot be read than may be left out.
        """
        self.batches.agree_on_samples(step, self.world, reads=self._reads)
        shape = self._shape_of(step)
        if shape in (None, self._shape):
            return
        self._shape = shape
        if shape not in self._pipelines:
            self.meter.start_step(step)
            builder, cache = self._builder(self.stages, self.world.positions), PartitionCache()
            with in_place_of_loss(self.definition.loss):
                boundaries = builder.probe_partition(lambda: self.batch(step), self.world.gather, known=cache)
            self._pipelines[shape] = builder.build(boundaries)
        self.pipeline = self._pipelines[shape]

    def _shape_of(self, step: int) -> Shapes | None:
        """Shapes of the inputs of ``step``, the same on all ranks; None: one rank runs any, or all are alike.

        Without a flush several steps are in flight, whose messages have one shape.
        """
        asynchronous = is_asynchronous(self.config.pipeline.schedule)
        if self.world.positions == 1 or asynchronous or has_one_shape(self.definition.batch):
            return None
        shape = None
        if self.world.rank == 0 or self._reads:
            shape = tuple(tuple(one.shape) for one in tensors_of(self.batch(step)[0]))
        if not is_read_in_order(self.definition.batch):
            with ACTIVITY.waiting(patient=True):
                shape = self.world.from_rank_0(shape, patient=True)
        return shape

    @property
    def _reads(self) -> bool:
        """True if this rank's stages need the data, or it has to read along."""
        return self.is_an_end or is_read_in_order(self.definition.batch)

    @property
    def is_an_end(self) -> bool:
        """True if this rank holds the first stage or the last one."""
        return self.world.position in self.holders[0] + self.holders[-1]

    def batch(self, step: int) -> Batch:
        """Inputs and targets of ``step``: this replica's microbatches of them."""
        return self.batches.of(step, self.world)

    def probe_seconds(self) -> list[float]:
        """Seconds of the same work in a step measured by layer, by rank; 0 for the others."""
        seconds = [0.0] * self.world.size
        if self.config.rebalance.enabled and self.meter.by_layer and self.meter.compares_ranks:
            self._probe = self._probe or SpeedProbe(self.meter, self.device)
            seconds[self.world.rank] = self._probe.seconds()
        return seconds

    def rebuild(self, step: int, boundaries: Boundaries | None = None) -> None:
        """Rebuild the pipeline after layers moved or froze; collective.

        ``boundaries``: result of a trial of the partition in force; None: it is tried now.

        Raises:
            TrialFailed: a stage cannot run.
        """
        self.profile.follows = self.world.positions > 1
        if self.frozen_outputs is not None:
            self.frozen_outputs.keep_only(frozen_layers(self.layers))
        if boundaries is None:
            self.partition_cache.forget()
            boundaries = self.probe_partition(step, self.stages)
        self.pipeline = self._builder(self.stages, self.world.positions).build(boundaries)
        self._shape = self.partition_cache.shape
        self._pipelines = {self._shape: self.pipeline}
        self.meter.start_step(step)

    def probe_partition(
        self,
        step: int,
        stages: tuple[Stage, ...],
        positions: int | None = None,
        *,
        in_force: tuple[Stage, ...] | None = None,
        joined: frozenset[int] = frozenset(),
    ) -> Boundaries:
        """Try a partition of the layers held, which need not be in force; collective over the world.

        Args:
            step: that comes next.
            stages: with ranks in the numbering of today.
            positions: of the pipeline that is to run them; None: unchanged.
            in_force: the partition that the ranks run: what is known need not run again.
            joined: pipeline positions of ranks that are new and have run nothing.

        Raises:
            TrialFailed: on every rank; a stage cannot run.
        """
        alone = (positions or self.world.positions) == 1 and self.world.size == 1
        shares = self.definition.shared_buffers or self.definition.tied
        parts = [part for layer in self.layers for part in layer.module.modules()]
        # Which of them forwards write, and checkpoints have, a trial shows.
        unsaved = any(part._non_persistent_buffers_set for part in parts)
        if alone and not (self.config.training.recompute or shares or unsaved):
            self.untried = Attributes(parts)
            return ()
        self.meter.start_step(step)
        self.partition_cache.of_inputs(self._shape_of(step))
        with in_place_of_loss(self.definition.loss):
            return self._builder(stages, positions or self.world.positions).probe_partition(
                lambda: self.batch(step),
                self.world.gather,
                known=self.partition_cache,
                in_force=in_force,
                joined=joined,
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
            independent_layers=self.definition.independent_layers and all(map(is_built_in, self.dynamics)),
            shared=tuple(axis for axis in self._shared_axes if axis.size > 1),
            frozen_outputs=self.frozen_outputs,
            pipelines=self.world.data.size,
            layer_ended=(self._shards_gradients, self._layer_ended) if self._reduces_early else None,
        )

    @property
    def _shards_gradients(self) -> bool:
        return self.config.parallelism.gradient_shares > 1

    @property
    def _reduces_early(self) -> bool:
        """True if nothing but backwards adds to gradients, or talks to the replicas while these run."""
        tensor, stragglers = self.config.parallelism.tensor, self.config.parallelism.stragglers
        return (
            self.world.data.size > 1
            and (tensor == 1 or stragglers.policy is StragglerPolicy.NONE)
            and not self._shares_experts
        )

    @property
    def _shared_axes(self) -> tuple[Axis, ...]:
        by_replicas = self.config.parallelism.weight_shares > 1 or self._shares_experts
        return (self.world.tensor, self.world.data) if by_replicas else (self.world.tensor,)

    @property
    def _shares_experts(self) -> bool:
        experts = (change.experts for change in self.config.dynamics)
        return any(of is not None and of.parallel for of in experts)

    def _layer_ended(self, index: int) -> None:
        if self._buckets is not None:
            self._buckets.layer_ended(index)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of the microbatch whose forward has just ended, weighted by its targets."""
        value = self.loss(output, target)
        running = CURRENT_FORWARD
        if running.microbatch is None or self.definition.loss_weight is None:
            return value
        return weighted(value, output, self.batches.factors(running.step, self.world)[running.microbatch])

    def complete_gradients(self) -> None:
        """Sum them over the replicas, and those of tied weights on their owners; collective."""
        if self.untried is not None:
            refuse_sparse_gradients(self.layers)
        buckets, self._buckets = self._buckets or GradientBuckets(self.world.data, self.layers), None
        buckets.finish()
        self.layers.release_weights()
        gather_gradients(self.definition.tied, self.world, self.layers, self._layer_holders)
        for dynamic in self.dynamics:
            dynamic.after_backward(self.layers)

    def optimizer_step(self, step: int, squared_norm: float, loss_scale: float = 1.0) -> None:
        """Update the layers held, and have what other ranks have updated of them; collective.

        Arguments as of :func:`ballast_trainer.layers.optimize.optimizer_step`.
        """
        optimizer_step(
            self.layers,
            self.config.training,
            self.meter,
            step=step,
            total_steps=self.config.total_steps,
            squared_norm=squared_norm,
            loss_scale=loss_scale,
        )
        gather_weights(self.world, self.layers)
        self.send_tied_weights()
        self._step_ended()

    def skip_update(self) -> None:
        """Forget a step's gradients without learning from them."""
        drop_gradients(self.layers)
        self._step_ended()

    def _step_ended(self) -> None:
        for dynamic in self.dynamics:
            dynamic.after_optimizer(self.layers)

    def send_tied_weights(self) -> None:
        """Give tied weights from their owners to their copies; collective."""
        send_weights(self.definition.tied, self.world, self.layers, self._layer_holders)

    def release(self) -> None:
        """Let go of the layers; what was measured of them stays."""
        self.layers.drop(self.layers.indices())
        self.pipeline, self._buckets = None, None
        self._pipelines.clear()

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each replica of the pipeline."""
        return self.config.pipeline.microbatches // self.world.data.size

    @property
    def microbatches_per_drain(self) -> int:
        """Microbatches that share one filling and draining of the pipeline: a step's, or a run's."""
        return self.microbatches * steps_between_drains(self.config)

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The pipeline position of each stage, for ``ranks`` ranks over all axes of the mesh."""
        return self.schedule_request(self.world.mesh.positions(ranks)).placement()

    def schedule_request(self, positions: int) -> ScheduleRequest:
        """The job's schedule over ``positions`` positions of the pipeline."""
        request = ScheduleRequest.of(self.config, positions)
        return dataclasses.replace(request, microbatches=self.microbatches)

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Pipeline positions that hold each stage: several where the stage has replicas."""
        return holders_of(self.stages, self.schedule_request(self.world.positions).replicas)

    @property
    def _layer_holders(self) -> list[tuple[int, ...]]:
        pairs = zip(self.stages, self.holders, strict=True)
        return [of for stage, of in pairs for _ in range(stage.first_layer, stage.end_layer)]

    @property
    def copies(self) -> int:
        """Number of positions that hold the layers that this one holds."""
        return max(len(holders) for holders in self.holders if self.world.position in holders)

    def held_layers(self) -> list[int]:
        """The layers that this rank holds under the stages in force."""
        holders = enumerate(self._layer_holders)
        return [layer for layer, positions in holders if self.world.position in positions]

    def rank_loads(self, costs: LayerCosts) -> list[float]:
        """Seconds per step of each pipeline position under the partition in force."""
        total = costs.total
        loads = [0.0] * self.world.positions
        for stage, holders in zip(self.stages, self.holders, strict=True):
            for position in holders:
                loads[position] += sum(total[stage.first_layer : stage.end_layer]) / len(holders)
        return loads
