"""Validation of a schedule: complete, in order, on the right ranks, free of deadlock.

A forward uses a version of its stage's weights: version v is the weights after v updates.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.schedule import Action, Kind, Schedule, ScheduleError, WeightRule
from ballast_policies.planning.schedules.simulate import simulate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """The memory and messages of a valid schedule.

    Attributes:
        in_flight: by rank, the most (stage, microbatch) whose activations are held at once:
            from the forward to the backward, or to the weight half of it.
        stage_in_flight: by stage, the most microbatches one of its ranks holds at once.
        versions_held: by stage, the most versions of its weights held at once.
        transfers: activations and gradients sent between ranks, in one step.
    """

    in_flight: tuple[int, ...]
    stage_in_flight: tuple[int, ...]
    versions_held: tuple[int, ...]
    transfers: int


def validate(schedule: Schedule) -> ScheduleFacts:
    """Check the schedule and return its needs of memory and messages.

    Raises:
        ScheduleError: an action is missing, doubled, on a wrong rank or before its inputs; the
            ranks deadlock; or a weight version is used before it exists.
    """
    _check_placement(schedule)
    _check_complete(schedule)
    for row in schedule.actions:
        _check_order(row)
    trace = simulate(schedule, even_costs(schedule.stages))
    by_rank, by_stage = _held(schedule)
    return ScheduleFacts(
        in_flight=by_rank,
        stage_in_flight=by_stage,
        versions_held=versions_held(schedule, weight_versions(schedule)),
        transfers=sum(trace.sent.values()),
    )


def _check_placement(schedule: Schedule) -> None:
    held = {rank for holders in schedule.stage_ranks for rank in holders}
    if held != set(range(schedule.ranks)):
        raise ScheduleError(f"stages are on ranks {sorted(held)}, actions on {schedule.ranks} ranks")
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.stage >= schedule.stages:
                raise ScheduleError(f"rank {rank} does {action}, but there are {schedule.stages} stages")
            if action.kind is Kind.UPDATE:
                if rank not in schedule.stage_ranks[action.stage]:
                    raise ScheduleError(f"rank {rank} does {action} of a stage it does not hold")
            elif schedule.rank_of(action.stage, action.microbatch) != rank:
                right = schedule.rank_of(action.stage, action.microbatch)
                raise ScheduleError(f"rank {rank} does {action}, which belongs to rank {right}")


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(a for row in schedule.actions for a in row if a.kind is not Kind.UPDATE)
    doubled = [action for action, count in counts.items() if count > 1]
    if doubled:
        raise ScheduleError(f"{doubled[0]} is there {counts[doubled[0]]} times: each action runs once")
    trains = any(action.kind is not Kind.FORWARD for action in counts)
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            forward = counts[Action(stage, Kind.FORWARD, k)]
            whole, half, rest = (
                counts[Action(stage, kind, k)]
                for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            )
            if not forward:
                raise ScheduleError(f"{stage}F{k} is missing: every stage sees every microbatch")
            if trains and (whole, half, rest) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"microbatch {k} on stage {stage} has {whole} B, {half} I, {rest} W: "
                    "it needs one B, or one I and one W"
                )
    stray = [a for a in counts if a.microbatch >= schedule.microbatches]
    if stray:
        raise ScheduleError(f"{stray[0]} is beyond the {schedule.microbatches} microbatches")


def _check_order(row: tuple[Action, ...]) -> None:
    place = {action: index for index, action in enumerate(row)}
    for action, index in place.items():
        first = None
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            first = Action(action.stage, Kind.FORWARD, action.microbatch)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            first = Action(action.stage, Kind.BACKWARD_INPUT, action.microbatch)
        if first is not None and place[first] > index:
            raise ScheduleError(f"{action} comes before {first}")


def _held(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    by_rank, by_stage = [0] * schedule.ranks, [0] * schedule.stages
    for rank, row in enumerate(schedule.actions):
        held: Counter[int] = Counter()
        for action in row:
            if action.kind is Kind.FORWARD:
                held[action.stage] += 1
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                held[action.stage] -= 1
            by_rank[rank] = max(by_rank[rank], held.total())
            by_stage[action.stage] = max(by_stage[action.stage], held[action.stage])
    return tuple(by_rank), tuple(by_stage)


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Version used by (stage, microbatch), the same for forward and backward.

    Flush: 0.  Stash: updates of the stage before the forward, so a straight pipeline's stage s of p
    (from 0) is p - 1 - s updates late.  Vertical sync: that of stage 0, on all stages.  Double
    buffered, with m microbatches per update: max(floor(k / m) - 1, 0), k from 0 (dissertation 3.2.1
    counts k from 1).
    """
    pairs = [(s, k) for s in range(schedule.stages) for k in range(schedule.microbatches)]
    if schedule.weights is WeightRule.FLUSH:
        return dict.fromkeys(pairs, 0)
    if schedule.weights is WeightRule.DOUBLE_BUFFERED:
        return {(s, k): max(k // schedule.update_every - 1, 0) for s, k in pairs}
    latest = _latest_at_forward(schedule)
    if schedule.weights is WeightRule.VERTICAL_SYNC:
        return {(s, k): latest[0, k] for s, k in pairs}
    return latest


def versions_held(schedule: Schedule, versions: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
    """Most versions, by stage, that any of its ranks holds at once: in use, to be used, and the latest.

    Raises:
        ScheduleError: a forward asks for a version that does not exist yet.
    """
    most = [1] * schedule.stages
    for row in schedule.actions:
        latest: dict[int, int] = {}
        in_use: dict[int, list[int]] = {}
        coming = {
            stage: [versions[stage, a.microbatch] for a in row if a.stage == stage and a.kind is Kind.FORWARD]
            for stage in {a.stage for a in row}
        }
        for action in row:
            stage = action.stage
            used = in_use.setdefault(stage, [])
            newest = latest.setdefault(stage, 0)
            if action.kind is Kind.UPDATE:
                latest[stage] = newest + 1
            elif action.kind is Kind.FORWARD:
                version = versions[stage, action.microbatch]
                if version > newest:
                    raise ScheduleError(
                        f"{action} needs version {version} of stage {stage}, which is at {newest}"
                    )
                used.append(coming[stage].pop(0))
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                used.remove(versions[stage, action.microbatch])
            # A version is kept while a forward of a later microbatch will still ask for it.
            awaited = {v for v in coming[stage] if v <= latest[stage]}
            most[stage] = max(most[stage], len({*used, *awaited, latest[stage]}))
    return tuple(most)


def _latest_at_forward(schedule: Schedule) -> dict[tuple[int, int], int]:
    latest: dict[tuple[int, int], int] = {}
    for row in schedule.actions:
        updates: dict[int, int] = {}
        for action in row:
            if action.kind is Kind.UPDATE:
                updates[action.stage] = updates.get(action.stage, 0) + 1
            elif action.kind is Kind.FORWARD:
                latest[action.stage, action.microbatch] = updates.get(action.stage, 0)
    return latest
