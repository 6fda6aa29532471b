"""Steps that are played action by action, and how long ones of very many microbatches take."""

from collections.abc import Callable

from ballast_policies.planning.partition import PlanningError

MOST_ACTIONS = 1_000_000
"""Actions of a step that is played whole: some ten seconds."""
FEW_ACTIONS = 20_000
"""Actions up to which a step is played to learn its length alone."""


def check_playable(ranks: int, microbatches: int, *, stages_per_rank: int = 1) -> None:
    """Refuse a step that would take minutes and gigabytes to play.

    Raises:
        PlanningError: with the counts.
    """
    actions = 2 * ranks * microbatches * stages_per_rank
    if actions > MOST_ACTIONS:
        raise PlanningError(
            f"a step of {microbatches} microbatches on {ranks} ranks has {actions} forwards and backwards; "
            f"at most {MOST_ACTIONS} are simulated. To fix: fewer, larger microbatches"
        )


def step_of_many(seconds_of: Callable[[int], float], microbatches: int, *, ranks: int, period: int) -> float:
    """Seconds of a step; of very many microbatches by the seconds that each further one takes.

    Args:
        seconds_of: number of microbatches -> seconds of a step, by playing it.
        microbatches: of the step.
        ranks: that work at it.
        period: microbatches after which the order of the ranks repeats.
    """
    most = max(FEW_ACTIONS // (2 * ranks), 8 * period)
    if microbatches <= most:
        return seconds_of(microbatches)
    # Two shorter steps that end in the same place of the period, both long enough to run evenly.
    longer = most - (most - microbatches) % period
    shorter = longer - max(1, longer // (2 * period)) * period
    long, short = seconds_of(longer), seconds_of(shorter)
    return long + (microbatches - longer) * (long - short) / (longer - shorter)
