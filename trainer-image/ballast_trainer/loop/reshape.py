"""Changes of shape between two steps: layers move, ranks leave, ranks join.

Each is collective over the ranks it concerns and returns how long training paused.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from ballast_policies.contract import Plan, Stage

from ballast_trainer.distributed.process_group import World, join
from ballast_trainer.dynamics.protocol import is_built_in
from ballast_trainer.loop.migrate import LayerMove, Migration, MigrationFailed, migrate, plan_moves
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.pipeline.stages import Boundaries
from ballast_trainer.pipeline.trial import TrialFailed
from ballast_trainer.profiling.stopwatch import Stopwatch

logger = logging.getLogger(__name__)


class CutRefused(MigrationFailed):
    """The stages of a new plan cannot run; every rank has the layers and the pipeline that it had."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeResult:
    """The result of a change of shape.

    Attributes:
        migration: layers moved and bytes sent.
        pause_ms: how long training paused.
        phases_ms: this rank's part of the pause, by phase; see ``docs/trainer-reshaping.md``.
        released: this rank is not part of the new plan.
    """

    migration: Migration
    pause_ms: float
    phases_ms: dict[str, float]
    released: bool = False


def _renumbered(stages: Sequence[Stage], rank_of: dict[int, int]) -> tuple[Stage, ...]:
    return tuple(stage.replace(rank=rank_of[stage.rank]) for stage in stages)


def _new_positions(world: World, plan: Plan) -> dict[int, int]:
    """Pipeline position today -> position in ``plan``, for those that it keeps.

    Raises:
        MigrationFailed: the plan separates ranks that share a position: they hold parts of the same
            layers, and are kept or released together.
    """
    mesh = world.mesh
    found = {}
    for position in range(world.positions):
        members = [plan.rank_of(world.processes[rank]) for rank in mesh.column_ranks(position)]
        first = members[0]
        if first is None and members == [None] * mesh.column:
            continue
        if first is None or first % mesh.column or members != list(range(first, first + mesh.column)):
            raise MigrationFailed(
                f"plan {plan.epoch} does not keep the ranks {list(mesh.column_ranks(position))} of pipeline "
                f"position {position} together. To fix: release or keep all {mesh.column} of them"
            )
        found[position] = first // mesh.column
    return found


def move_layers(training: TrainingState, stages: tuple[Stage, ...]) -> ReshapeResult:
    """Rebalance: the same ranks, another partition.

    Raises:
        MigrationFailed: nothing has changed.
    """
    watch = Stopwatch()
    moves = plan_moves(training.stages, stages, training.config.pipeline.replicas)
    migration, boundaries = _move_and_try(
        training, moves, stages, in_force=training.stages, overlap=moves, watch=watch
    )
    migration.send_rest(training.world, training.layers, moves)
    watch.lap("rest")
    training.stages = stages
    return _resumed(training, boundaries, migration, watch)


def _resumed(
    training: TrainingState, boundaries: Boundaries, migration: Migration, watch: Stopwatch
) -> ReshapeResult:
    """The pipeline of the new stages is rebuilt, with the layers that this rank keeps."""
    _keep_own(training)
    training.rebuild(boundaries)
    watch.lap("rebuild")
    return ReshapeResult(migration=migration, pause_ms=watch.milliseconds(), phases_ms=watch.phases)


def _move_and_try(
    training: TrainingState,
    moves: tuple[LayerMove, ...],
    stages: tuple[Stage, ...],
    positions: int | None = None,
    *,
    in_force: tuple[Stage, ...],
    joined: frozenset[int] = frozenset(),
    overlap: Sequence[LayerMove],
    watch: Stopwatch,
) -> tuple[Migration, Boundaries]:
    """Send layers to their ranks under ``stages``, and try that partition; every rank keeps those it sent.

    Args:
        training: the job.
        moves: from the partition in force.
        stages: the new partition, with ranks in the numbering of today.
        positions: of the pipeline that is to run them; None: unchanged.
        in_force: today's partition.
        joined: positions of ranks that are new.
        overlap: the moves whose optimizers' tensors may travel during the next step.
        watch: counts the phases.

    Raises:
        MigrationFailed: nothing has changed.
    """
    before = training.layers.indices()
    if not all(map(is_built_in, training.dynamics)):
        # A user's own change may look at the optimizers when layers arrive.
        overlap = ()
    migration = migrate(training.world, training.layers, moves, overlap=overlap, watch=watch)
    training.apply_dynamics()
    try:
        boundaries = training.probe_partition(stages, positions, in_force=in_force, joined=joined)
    except TrialFailed as error:
        training.layers.drop(set(training.layers.indices()).difference(before))
        raise CutRefused(f"these stages cannot run, all stays as it was: {error}") from error
    watch.lap("trial")
    return migration, boundaries


def _keep_own(training: TrainingState) -> None:
    """Release the layers that this rank has sent."""
    training.layers.drop(set(training.layers.indices()).difference(training.held_layers()))


def shrink(
    training: TrainingState, plan: Plan, stages: tuple[Stage, ...], timeout_seconds: float
) -> ReshapeResult:
    """Repack: layers move to the ranks that stay, the others are released.

    Args:
        training: the job.
        plan: the new epoch; its processes are a subset of today's.
        stages: the partition, ranks in the new plan's numbering.
        timeout_seconds: how long to wait for the other ranks.

    Raises:
        MigrationFailed: nothing has changed.
        PeerLost: a rank that stays does not come.
    """
    watch = Stopwatch()
    new_position = _new_positions(training.world, plan)
    today = _renumbered(stages, {new: old for old, new in new_position.items()})
    moves = plan_moves(training.stages, today)
    # What a rank has sent before it leaves cannot be lost with it.
    overlap = [move for move in moves if move.source in new_position]
    migration, boundaries = _move_and_try(
        training, moves, today, len(new_position), in_force=training.stages, overlap=overlap, watch=watch
    )
    rank = plan.rank_of(training.world.processes[training.world.rank])
    store = training.world.store
    training.world.leave()
    if rank is None:
        return ReshapeResult(
            migration=migration, pause_ms=watch.milliseconds(), phases_ms=watch.phases, released=True
        )
    world = _enter(training, plan, stages, store, rank, timeout_seconds)
    watch.lap("meet")
    renumbered = [
        dataclasses.replace(
            move, source=new_position.get(move.source, move.source), target=new_position[move.target]
        )
        for move in moves
    ]
    migration.send_rest(world, training.layers, renumbered)
    watch.lap("rest")
    return _resumed(training, boundaries, migration, watch)


def grow(
    training: TrainingState, plan: Plan, stages: tuple[Stage, ...], timeout_seconds: float
) -> ReshapeResult:
    """New ranks join and take over layers; the same call on old ranks and new ones.

    Raises:
        MigrationFailed: the ranks of before have left the new ones and changed nothing; a new rank is
            not part of the job then.
        PeerLost: a rank does not come.
    """
    watch = Stopwatch()
    positions = _new_positions(training.world, plan)
    store, rank = training.world.store, plan.rank_of(training.world.processes[training.world.rank])
    if rank is None or len(positions) < training.world.positions:
        raise ValueError(f"plan {plan.epoch} grows the job but leaves out {training.world.processes}")
    old_plan, old_rank, unchanged = training.plan, training.world.rank, training.stages
    old_stages = _renumbered(unchanged, positions)
    training.layers.settle()
    training.world.leave()
    _enter(training, plan, stages, store, rank, timeout_seconds)
    training.world.from_rank_0((_shared(training), old_stages, stages))
    watch.lap("meet")
    try:
        migration, boundaries = _take_over(training, old_stages, watch)
    except MigrationFailed:
        training.world.leave()
        # Under a new prefix: the old plan's holds addresses of the group that has ended.
        apart = dist.PrefixStore(f"after-epoch-{plan.epoch}", store)
        _enter(training, old_plan, unchanged, apart, old_rank, timeout_seconds)
        training.world = dataclasses.replace(training.world, store=store)
        training.rebuild()
        raise
    return _resumed(training, boundaries, migration, watch)


def _take_over(
    training: TrainingState, old_stages: tuple[Stage, ...], watch: Stopwatch
) -> tuple[Migration, Boundaries]:
    """Layers come to the ranks that have joined; on old ranks and new ones.

    Raises:
        MigrationFailed: every rank has the layers that it had.
    """
    moves = plan_moves(old_stages, training.stages)
    joined = frozenset(range(training.world.positions)).difference(stage.rank for stage in old_stages)
    migration, boundaries = _move_and_try(
        training, moves, training.stages, in_force=old_stages, joined=joined, overlap=moves, watch=watch
    )
    migration.send_rest(training.world, training.layers, moves)
    watch.lap("rest")
    return migration, boundaries


def _shared(training: TrainingState) -> tuple[Any, ...]:
    """What every rank has alike and a new one has to be told."""
    own = training.step, training.checkpoint_step, training.save_again_at, training.loss_scale.state
    return *own, training.data_position(), training.partition_cache


def enter_grown(training: TrainingState, world: World) -> None:
    """A new rank's side of :func:`grow`: get step and partition from rank 0, receive layers."""
    shared, old_stages, training.stages = world.from_rank_0(None)
    training.step, training.checkpoint_step, training.save_again_at, loss_scale, data, cache = shared
    training.continue_data(data)
    training.partition_cache = cache
    training.loss_scale.restore(loss_scale)
    _, boundaries = _take_over(training, old_stages, Stopwatch())
    training.rebuild(boundaries)


def _enter(
    training: TrainingState,
    plan: Plan,
    stages: tuple[Stage, ...],
    store: object,
    rank: int,
    timeout_seconds: float,
) -> World:
    before = training.world
    joined = join(
        store=store,
        plan=plan,
        rank=rank,
        device=training.device,
        timeout_seconds=timeout_seconds,
        mesh=before.mesh,
    )
    # Layers communicate over these two, which a change of the pipeline's length leaves as long as they are.
    training.world = dataclasses.replace(
        joined, data=before.data.follow(joined.data), tensor=before.tensor.follow(joined.tensor)
    )
    training.meter.first_microbatch = training.world.data.index * training.microbatches
    training.plan = plan
    training.stages = stages
    return training.world
