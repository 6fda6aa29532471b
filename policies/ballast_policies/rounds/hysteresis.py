"""Hysteresis: gangs that a round must not disturb, and GPUs kept free for gangs that wait for them."""

from collections.abc import Iterable, Mapping

import numpy as np

from ballast_policies.rounds.claims import Claims
from ballast_policies.rounds.ledger import Ledger, in_its_pools
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Placement, RoundState

HOUR = 3600.0


def within_min_run(question: Question, gangs: Iterable[str]) -> dict[str, str]:
    """Those of the gangs that must stay, all of them within a round -> why."""
    least = question.settings.min_run_seconds
    if question.settings.within_round:
        return dict.fromkeys(gangs, "holds them until the round ends")
    pinned = {}
    for job in gangs:
        ran = question.ran(job)
        if ran < least:
            pinned[job] = f"has run {ran:.0f} s, less than moves.minRunSeconds={least:.0f}"
    return pinned


def moves_left(question: Question) -> int:
    """Running gangs that may still be stopped or moved in this hour; all of them where there is no limit."""
    most = question.settings.max_moves_per_hour
    if most is None:
        return len(question.state.running)
    return max(0, most - len(recent_moves(question.state.moves, question.now)))


def recent_moves(moves: tuple[float, ...], now: float) -> tuple[float, ...]:
    """Those of ``moves`` (times, seconds) that happened within the hour before ``now``."""
    return tuple(at for at in moves if now - at < HOUR)


def keeps_free(question: Question) -> bool:
    """Whether GPUs that come free are kept for a gang that waits for gangs that must not be disturbed.

    Not needed within a round whose end may stop all of them: the gang gets its GPUs there.
    """
    settings, running = question.settings, question.state.running
    every_gang_may_be_stopped = settings.min_run_seconds <= 0 and moves_left(question) >= len(running)
    return not settings.within_round or not every_gang_may_be_stopped


def exempt_newest(
    disturbed: Mapping[str, Placement], state: RoundState, limit: int, reason: str
) -> dict[str, str]:
    """All but ``limit`` of the disturbed gangs -> why they keep their GPUs.

    Exempt are those that have run the shortest time: stopping them would waste most of their start.
    """
    newest = sorted(disturbed, key=lambda job: (-state.running_since.get(job, 0.0), job))
    return dict.fromkeys(newest[: len(disturbed) - limit], reason)


def reserved_columns(
    claims: Claims, granted: np.ndarray, unhindered: np.ndarray, columns: Mapping[int, Iterable[int]]
) -> dict[int, int]:
    """Columns in which nothing may start this round -> position of the claim that they are kept for.

    A gang that would run now if the protected gangs could be stopped would wait indefinitely if every
    GPU that comes free were given to a smaller one. So the most urgent such claim of a column
    reserves what is free there; gangs that run there continue.

    Args:
        claims: in order of urgency.
        granted: positions of the granted ones.
        unhindered: positions that would be granted if every running gang could be stopped.
        columns: job with a claim on several columns -> those of which it would be granted GPUs.
    """
    running = set(claims.job[granted].tolist())
    closed: dict[int, int] = {}
    for position in unhindered.tolist():
        job = int(claims.job[position])
        if job not in running:
            for column in columns.get(job, (int(claims.column[position]),)):
                closed.setdefault(column, position)
    return closed


def valid_placements(question: Question) -> dict[str, Placement]:
    """Running gangs that could continue where they are: same size and pool, usable type, nodes large enough.

    Where a node has lost GPUs, the gangs that began first stay.
    """
    state, jobs = question.state, {job.name: job for job in question.jobs}
    ledger = Ledger(question.nodes)
    valid = {}
    for name in sorted(state.running, key=lambda name: (state.running_since.get(name, 0.0), name)):
        placement, job = state.running[name], jobs.get(name)
        if job is None or not (
            placement.parts
            or (job.gpus == len(placement.nodes) and job.throughput.get(placement.gpu_type, 0.0) > 0)
        ):
            continue
        if in_its_pools(placement, ledger.nodes) and ledger.grant(placement.nodes):
            valid[name] = placement
    return valid
