"""Which running gangs a round must leave alone, and what it keeps free for a gang that waits for them."""

from collections.abc import Mapping

import numpy as np

from ballast_policies.rounds.selection import Claims
from ballast_policies.rounds.values import Gang, Placement, RoundSettings, RoundState

HOUR = 3600.0


def too_young(
    now: float, valid: Mapping[str, Placement], state: RoundState, settings: RoundSettings
) -> dict[str, str]:
    """Gangs that have not run ``min_run_seconds`` yet -> why they stay, in words; within a round: all."""
    if settings.within_round:
        return dict.fromkeys(valid, "holds them until the round ends")
    pinned = {}
    for job in valid:
        ran = now - state.running_since.get(job, now)
        if ran < settings.min_run_seconds:
            pinned[job] = f"has run {ran:.0f} s of the {settings.min_run_seconds:.0f} s that it is left alone"
    return pinned


def moves_left(now: float, state: RoundState, settings: RoundSettings) -> int | None:
    """How many running gangs may still be stopped or moved in this hour; None: no limit."""
    if settings.max_moves_per_hour is None:
        return None
    return max(0, settings.max_moves_per_hour - sum(1 for at in state.moves if now - at < HOUR))


def spared(disturbed: Mapping[str, Placement], state: RoundState, limit: int, words: str) -> dict[str, str]:
    """All but ``limit`` of the disturbed gangs -> why they stay after all.

    Spared are those that have run the shortest: they have had the least use of their start.
    """
    newest = sorted(disturbed, key=lambda job: (-state.running_since.get(job, 0.0), job))
    return dict.fromkeys(newest[: len(disturbed) - limit], words)


def keep_free(claims: Claims, granted: np.ndarray, unhindered: np.ndarray) -> dict[int, int]:
    """Columns in which nothing may start this round -> position of the claim that they are kept for.

    A gang that would run now, if other gangs had not to be left alone, would wait for ever if every
    GPU that comes free were given to a smaller one. So the most urgent such claim of a column
    keeps what is free there; gangs that run there may go on.

    Args:
        claims: in order of urgency.
        granted: positions of the granted ones.
        unhindered: positions that would be granted if every running gang could be stopped.
    """
    running = set(claims.job[granted].tolist())
    closed: dict[int, int] = {}
    for position in unhindered.tolist():
        if int(claims.job[position]) not in running:
            closed.setdefault(int(claims.column[position]), position)
    return closed


def valid_placements(
    gangs: Mapping[str, Gang], capacity: Mapping[str, int], state: RoundState
) -> dict[str, Placement]:
    """Running gangs that could go on where they are: same size, usable type, nodes there and large enough.

    Where a node has lost GPUs, the gangs that began first stay.
    """
    free = dict(capacity)
    valid = {}
    for job in sorted(state.running, key=lambda job: (state.running_since.get(job, 0.0), job)):
        placement, gang = state.running[job], gangs.get(job)
        if (
            gang is None
            or gang.gpus != len(placement.nodes)
            or gang.throughput.get(placement.gpu_type, 0.0) <= 0
        ):
            continue
        if all(free.get(name, 0) >= placement.nodes.count(name) for name in set(placement.nodes)):
            for name in placement.nodes:
                free[name] -= 1
            valid[job] = placement
    return valid
