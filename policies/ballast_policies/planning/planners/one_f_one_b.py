"""The end of a 1F1B step of many pipelines at once, in closed recurrences (the simulator's times, faster).

Stage i of p first does w = p - 1 - i forwards, then a forward and a backward in turn.  So B(i, k) follows
F(i, k + w) and is followed by F(i, k + w + 1), which needs F(i - 1, k + w + 1), done before B(i - 1, k):
with the forwards before column 0 known, each column k is the backwards of microbatch k from the last stage
to the first, and then one forward on each stage.  Both are chains x_i = max(r_i, x_{i-1} + e) + f_i, which
is a running maximum after subtracting the prefix sums.  Each link carries one transfer at a time each way,
as in ``schedules.simulate`` with ``serial_links``.

A step of very many microbatches is as long as shorter ones tell, which are played action by action.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ballast_policies.planning.partition import PlanningError

_ALIKE = 1e-13
"""Relative difference up to which two columns advance equally."""

_LONGEST_PERIOD = 8
"""Columns after which advances are compared, at most."""

_State = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Times at which each stage, each link to the right and each to the left is free."""

_PLAYED = 8192
"""Microbatches that are gone through at most."""


def backward_ends(
    forward: np.ndarray, backward: np.ndarray, transfer: np.ndarray, microbatches: int
) -> np.ndarray:
    """Second at which each stage has done its last backward, shape (n, p).

    Args:
        forward: seconds of a forward of one microbatch by pipeline and stage, shape (n, p).
        backward: the same of a backward.
        transfer: seconds of an activation, or of its gradient, after each stage but the last, shape
            (n, p - 1).
        microbatches: of each pipeline.
    """
    n, p = forward.shape
    if p == 1:
        return np.asarray(microbatches * (forward + backward))
    if microbatches > _PLAYED:
        # By what each of the later ones takes: rounding may hide that columns advance equally.
        long, short = (backward_ends(forward, backward, transfer, m) for m in (_PLAYED, _PLAYED // 2))
        return np.asarray(long + (microbatches - _PLAYED) * (long - short) / (_PLAYED - _PLAYED // 2))
    clock, to_right, to_left = np.zeros((n, p)), np.zeros((n, p - 1)), np.zeros((n, p - 1))
    for k in range(min(p, microbatches)):
        # Microbatch k passes the stages that have it in flight before their first backward.
        last = p - k
        done = _chain(clock[:, :last], to_right[:, : last - 1], transfer[:, : last - 1], forward[:, :last])
        clock[:, :last] = done
        sent = min(last, p - 1)
        to_right[:, :sent] = np.maximum(done[:, :sent], to_right[:, :sent]) + transfer[:, :sent]
    k, before = 0, deque([(clock, to_right, to_left)], maxlen=_LONGEST_PERIOD)
    while k < microbatches:
        done = _chain(clock[:, ::-1], to_left[:, ::-1], transfer[:, ::-1], backward[:, ::-1])[:, ::-1]
        to_left = np.maximum(done[:, 1:], to_left) + transfer
        clock = done
        # Stage i forwards microbatch k + p - i, where there is one.
        first = max(k + p - microbatches + 1, 1)
        if first < p:
            ready = np.maximum(done[:, first:], to_right[:, first - 1 :])
            clock = done.copy()
            clock[:, first:] = ready + forward[:, first:]
        own = k + p < microbatches
        if own:
            clock = clock.copy() if clock is done else clock
            clock[:, 0] = done[:, 0] + forward[:, 0]
        begin = 0 if own else first
        if begin < p - 1:
            to_right = to_right.copy()
            to_right[:, begin:] = np.maximum(clock[:, begin:-1], to_right[:, begin:]) + transfer[:, begin:]
        k += 1
        left = microbatches - p - 1 - k
        if left > 1 and k % 4 == 0:
            period, advance = _steady((clock, to_right, to_left), before)
            skipped = left // period if period else 0
            if skipped:
                clock, to_right, to_left = (state + skipped * advance for state in (clock, to_right, to_left))
                k += skipped * period
        before.append((clock, to_right, to_left))
    return clock


def _steady(now: _State, before: Sequence[_State]) -> tuple[int, np.ndarray]:
    """(columns after which everything has advanced equally, by how much (n, 1)); (0, ...): not yet.

    Where stages wait for each other across links, columns take turns: two and two take equally long.
    """
    here = np.concatenate(now, axis=1)
    tolerance = _ALIKE * np.abs(now[0]).max(axis=1, keepdims=True)
    for period in range(1, len(before) + 1):
        every = here - np.concatenate(before[-period], axis=1)
        if (np.abs(every - every[:, :1]) <= tolerance).all():
            return period, every[:, :1]
    return 0, here[:, :1]


def _chain(ready: np.ndarray, arriving: np.ndarray, link: np.ndarray, work: np.ndarray) -> np.ndarray:
    """x_i = max(ready_i, (max(x_{i-1}, arriving before) + link)) + work_i along axis 1.

    ``arriving`` is when the link's transfer before this one ends.
    """
    start = ready.copy()
    start[:, 1:] = np.maximum(start[:, 1:], arriving + link)
    total = np.cumsum(work, axis=1)
    total[:, 1:] += np.cumsum(link, axis=1)
    done: np.ndarray = np.maximum.accumulate(start + work - total, axis=1) + total
    return done


MOST_ACTIONS = 1_000_000
"""Actions of a step that is played whole: some ten seconds."""
FEW_ACTIONS = 20_000
"""Actions up to which a step is played to learn its length alone."""


def check_playable(ranks: int, microbatches: int, *, stages_per_rank: int = 1) -> None:
    """Refuse a step that would take minutes and gigabytes to play. Raises PlanningError: with the counts."""
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
