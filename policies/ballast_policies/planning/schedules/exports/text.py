"""Schedules and traces as text: one line a rank, a CSV that torch reads, and a time line of characters."""

from ballast_policies.planning.schedules.action import Action, Kind, ScheduleError
from ballast_policies.planning.schedules.schedule import Schedule, WeightRule
from ballast_policies.planning.schedules.simulate import Trace


def schedule_text(schedule: Schedule) -> str:
    """The order of actions, one line a rank: ``rank 0: 0F0 0F1 0B0 ...``."""
    return "\n".join(
        f"rank {rank}: {' '.join(str(action) for action in row)}" for rank, row in enumerate(schedule.actions)
    )


def schedule_csv(schedule: Schedule) -> str:
    """One line a rank, actions separated by commas: what torch's runtime loads (``compute_only``).

    Raises:
        ScheduleError: the schedule updates weights between microbatches, which torch's runtime does not do.
    """
    if any(action.kind is Kind.UPDATE for row in schedule.actions for action in row):
        raise ScheduleError(f"{schedule.name} has updates between microbatches: the CSV form knows none")
    return "".join(",".join(str(action) for action in row) + "\n" for row in schedule.actions)


def schedule_from_csv(
    text: str, *, name: str, stage_ranks: tuple[tuple[int, ...], ...] | None = None
) -> Schedule:
    """Read a schedule with a flush back; the rank of a stage is the one that acts on it.

    Raises:
        ScheduleError: an entry is not an action, or two ranks act on one stage and ``stage_ranks``
            does not tell which microbatches belong to which replica.
    """
    rows = tuple(
        tuple(Action.parse(entry) for entry in line.split(",") if entry.strip()) for line in text.splitlines()
    )
    if not any(rows):
        raise ScheduleError("the CSV holds no actions")
    owners: dict[int, set[int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            owners.setdefault(action.stage, set()).add(rank)
    if stage_ranks is None:
        shared = [stage for stage, ranks in owners.items() if len(ranks) > 1]
        if shared:
            raise ScheduleError(
                f"stage {shared[0]} is on ranks {sorted(owners[shared[0]])}: give stage_ranks"
            )
        missing = set(range(max(owners) + 1)) - set(owners)
        if missing:
            raise ScheduleError(f"no rank acts on stages {sorted(missing)}")
        stage_ranks = tuple(tuple(owners[stage]) for stage in range(len(owners)))
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    return Schedule(
        name=name,
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=rows,
        weights=WeightRule.FLUSH,
        update_every=microbatches,
    )


def timeline(trace: Trace, *, columns: int = 100) -> str:
    """A time line, one row of characters a rank: the microbatch's last digit, in turns of action.

    Forward ``0`` to ``9``, backward ``a`` to ``j`` (for microbatch 0 to 9 and again), weight half
    ``w``, update ``|``, idle ``.``.
    """
    if trace.makespan <= 0:
        return ""
    scale = columns / trace.makespan
    lines = [["."] * columns for _ in trace.busy]
    for span in trace.spans:
        letter = _letter(span.action)
        first = round(span.start * scale)
        for column in range(first, max(first + 1, round(span.end * scale))):
            if column < columns:
                lines[span.rank][column] = letter
    return "\n".join(f"rank {rank:>2} {''.join(line)}" for rank, line in enumerate(lines))


def _letter(action: Action) -> str:
    digit = action.microbatch % 10
    return {
        Kind.FORWARD: str(digit),
        Kind.BACKWARD: chr(ord("a") + digit),
        Kind.BACKWARD_INPUT: chr(ord("a") + digit),
        Kind.BACKWARD_WEIGHT: "w",
        Kind.UPDATE: "|",
    }[action.kind]
