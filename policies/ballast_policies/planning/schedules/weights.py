"""Weight versions under a schedule: the version that each microbatch uses, and the number held by a stage.

Version v of a stage is its weights after v updates.
"""

from collections.abc import Mapping

from ballast_policies.planning.schedules.action import Kind, ScheduleError
from ballast_policies.planning.schedules.schedule import Schedule, WeightRule


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
    """By stage, the most versions any of its ranks holds at once: those in use, to be used, and the latest.

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
