"""Changes of shape between two steps: layers move, ranks leave, ranks join.

Each is collective over the ranks it concerns and returns how long training paused.
"""

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from ballast_policies.contract.messages import Stage
from ballast_policies.contract.plan import Plan

from ballast_trainer.distributed.activity import Limit
from ballast_trainer.distributed.process_group import World, join
from ballast_trainer.dynamics.protocol import is_built_in
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.loop.migrate import LayerMove, Migration, MigrationFailed, migrate, owners, plan_moves
from ballast_trainer.loop.state import ModelState, RunState
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


def move_layers(
    model: ModelState,
    run: RunState,
    stages: tuple[Stage, ...],
    *,
    in_force: tuple[Stage, ...] | None = None,
    watch: Stopwatch | None = None,
) -> ReshapeResult:
    """Another partition of the same ranks; ``in_force``: that of those that are not new, None: of all.

    Raises:
        MigrationFailed: nothing has changed.
    """
    watch = watch or Stopwatch()
    in_force = model.stages if in_force is None else in_force
    migration, boundaries = _move_and_try(model, run.step, stages, in_force=in_force, watch=watch)
    return _resumed(model, run.step, stages, boundaries, migration, migration.moves, watch)


def _resumed(
    model: ModelState,
    step: int,
    stages: tuple[Stage, ...],
    boundaries: Boundaries,
    migration: Migration,
    moves: Sequence[LayerMove],
    watch: Stopwatch,
) -> ReshapeResult:
    """The rest of the moved layers follows, those that this rank has sent are released, and it trains on."""
    migration.send_rest(model.world, model.layers, moves)
    watch.lap("rest")
    model.stages = stages
    model.layers.drop(set(model.layers.indices()).difference(model.held_layers()))
    model.rebuild(step, boundaries)
    watch.lap("rebuild")
    return ReshapeResult(migration=migration, pause_ms=watch.milliseconds(), phases_ms=watch.phases)


def _move_and_try(
    model: ModelState,
    step: int,
    stages: tuple[Stage, ...],
    *,
    in_force: tuple[Stage, ...],
    kept: Collection[int] | None = None,
    watch: Stopwatch,
) -> tuple[Migration, Boundaries]:
    """Send layers to their ranks under ``stages``, and try that partition; every rank keeps those it sent.

    Args:
        model: what is trained.
        step: that comes next.
        stages: the new partition, with ranks in the numbering of today.
        in_force: today's partition; ranks that hold none of it are new.
        kept: positions of the pipeline that is to run the new one; None: all of today's.
        watch: counts the phases.

    Raises:
        MigrationFailed: nothing has changed.
    """
    before, replicas = model.layers.indices(), model.config.pipeline.used_replicas
    positions = range(model.world.positions)
    kept = positions if kept is None else kept
    moves = plan_moves(in_force, stages, replicas)
    # What a rank has sent before it leaves cannot be lost with it, a user's own change may look at the
    # optimizers when layers arrive, and a replica goes on with its own; of the others the optimizers' tensors
    # may travel during the next step.
    own, after = all(map(is_built_in, model.dynamics)), owners(stages, replicas)
    overlap = [m for m in moves if own and m.source in kept and m.source not in after[m.layer]]
    joined = frozenset(positions).difference(*owners(in_force, replicas).values())
    migration = migrate(model.world, model.layers, moves, overlap=overlap, watch=watch)
    for dynamic in model.dynamics:
        dynamic.reapply(step, model.layers)
    try:
        boundaries = model.probe_partition(step, stages, len(kept), in_force=in_force, joined=joined)
    except (TrialFailed, ConfigurationError) as error:
        model.layers.drop(set(model.layers.indices()).difference(before))
        raise CutRefused(f"these stages cannot run, all stays as it was: {error}") from error
    watch.lap("trial")
    return migration, boundaries


def shrink(model: ModelState, run: RunState, plan: Plan, stages: tuple[Stage, ...]) -> ReshapeResult:
    """Repack: layers move to the ranks that stay, the others are released.

    The processes of ``plan`` are a subset of today's; ``stages`` has ranks in its numbering.

    Raises:
        MigrationFailed: nothing has changed.
        PeerLost: a rank that stays does not come.
    """
    watch = Stopwatch()
    new_position = _new_positions(model.world, plan)
    today = _renumbered(stages, {new: old for old, new in new_position.items()})
    migration, boundaries = _move_and_try(
        model, run.step, today, in_force=model.stages, kept=new_position, watch=watch
    )
    rank = plan.rank_of(model.world.processes[model.world.rank])
    store = model.world.store
    model.world.leave()
    if rank is None:
        return ReshapeResult(
            migration=migration, pause_ms=watch.milliseconds(), phases_ms=watch.phases, released=True
        )
    _enter(model, run, plan, stages, store, rank)
    watch.lap("meet")
    renumbered = [
        dataclasses.replace(
            move, source=new_position.get(move.source, move.source), target=new_position[move.target]
        )
        for move in migration.moves
    ]
    return _resumed(model, run.step, stages, boundaries, migration, renumbered, watch)


def grow(model: ModelState, run: RunState, plan: Plan, stages: tuple[Stage, ...]) -> ReshapeResult:
    """New ranks join and take over layers; the same call on old ranks and new ones.

    Raises:
        MigrationFailed: the ranks of before have left the new ones and changed nothing; a new rank is
            not part of the job then.
        PeerLost: a rank does not come.
    """
    watch = Stopwatch()
    positions = _new_positions(model.world, plan)
    store, rank = model.world.store, plan.rank_of(model.world.processes[model.world.rank])
    if rank is None or len(positions) < model.world.positions:
        raise ValueError(f"plan {plan.epoch} grows the job but leaves out {model.world.processes}")
    old_plan, old_rank, unchanged = run.plan, model.world.rank, model.stages
    old_stages = _renumbered(unchanged, positions)
    model.layers.settle()
    model.world.leave()
    _enter(model, run, plan, stages, store, rank)
    shared = run, model.batches.position(run.step), model.partition_cache, old_stages, stages
    model.world.from_rank_0(shared)
    watch.lap("meet")
    try:
        return move_layers(model, run, stages, in_force=old_stages, watch=watch)
    except MigrationFailed:
        model.world.leave()
        # Under a new prefix: the old plan's holds addresses of the group that has ended.
        apart = dist.PrefixStore(f"after-epoch-{plan.epoch}", store)
        _enter(model, run, old_plan, unchanged, apart, old_rank)
        model.world = dataclasses.replace(model.world, store=store)
        model.rebuild(run.step)
        raise


def enter_grown(model: ModelState, run: RunState) -> None:
    """A new rank's side of :func:`grow`: get step and partition from rank 0, receive layers."""
    known: tuple[RunState, Any, Any, Any, Any] = model.world.from_rank_0(None)
    others, data, model.partition_cache, old_stages, model.stages = known
    run.continue_from(others.step, others.loss_scale.state, others.checkpoint_step, others.save_again_at)
    model.batches.continue_from(run.step, data)
    move_layers(model, run, model.stages, in_force=old_stages)


def _enter(
    model: ModelState, run: RunState, plan: Plan, stages: tuple[Stage, ...], store: object, rank: int
) -> None:
    before = model.world
    joined = join(
        store=store,
        plan=plan,
        rank=rank,
        device=model.device,
        timeout_seconds=max(Limit.seconds_of(model.config).values()),
        mesh=before.mesh,
    )
    # Layers communicate over these two, which a change of the pipeline's length leaves as long as they are.
    model.world = dataclasses.replace(
        joined, data=before.data.follow(joined.data), tensor=before.tensor.follow(joined.tensor)
    )
    run.plan = plan
    model.stages = stages
