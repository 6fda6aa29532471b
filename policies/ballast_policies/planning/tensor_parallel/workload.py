"""Policies for the stragglers of a tensor-parallel group: none, resize, migrate, or both.

Seconds are measured while earlier decisions are in force; they are first converted to the
seconds of every rank's own work alone, so that a successful decision does not undo itself.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ballast_policies.planning.tensor_parallel.resizing import excess_columns, resize_ratios
from ballast_policies.planning.tensor_parallel.semi import (
    TOLERANCE,
    MoveCosts,
    SemiDecision,
    decide_semi,
    level_seconds,
    mean_is_stale,
    semi_seconds,
    stragglers,
)

POLICIES = ("none", "resize", "migrate", "semi")
"""No change; ZERO-resizing of all excess columns; migration of all of them; SEMI's split."""

LEAST_GAIN = 0.02
"""Fraction by which a step must be expected to fall: what is gained less than that, noise takes away."""

_LARGEST_CHANGE = 0.8
"""Relative; a trial after many in vain waits for no larger one."""

_NEAR = 0.01
"""Relative difference up to which splits count as equally fast; the one that loses least is taken."""


def own_work_seconds(
    seconds: Sequence[float],
    product_seconds: Sequence[float],
    columns: Sequence[int],
    in_force: SemiDecision | None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """T and M as they would be if each rank did exactly its own work.

    A rank whose products do the fraction w of its own columns (those it keeps plus those it helps
    with) would need M / w for all of them; the rest of T stays.

    Args:
        seconds: T, by rank, measured.
        product_seconds: M, by rank, measured.
        columns: L, by rank.
        in_force: the decision under which they were measured.
    """
    if in_force is None:
        return tuple(seconds), tuple(product_seconds)
    whole_seconds, whole_products = [], []
    done = in_force.computed(columns)
    for rank, (total, products) in enumerate(zip(seconds, product_seconds, strict=True)):
        whole = products * columns[rank] / done[rank]
        whole_products.append(whole)
        whole_seconds.append(total - products + whole)
    return tuple(whole_seconds), tuple(whole_products)


def decide_workload(
    policy: str,
    seconds: Sequence[float],
    product_seconds: Sequence[float],
    columns: Sequence[int],
    *,
    costs: MoveCosts,
    tolerance: float = TOLERANCE,
) -> SemiDecision:
    """Columns that each rank of the group prunes and migrates.

    ``resize`` brings late ranks to the mean of the group (equation 1), ``migrate`` to the fastest rank or, of
    the slowest alone, to the level of their helpers.  ``semi`` is the best, by the measured costs, of
    Algorithm 2's split, of these, and of each number of ranks that migrate while the rest is left out.  Where
    none makes a step shorter by :data:`LEAST_GAIN`, nothing is done; the paper does not check.

    Args:
        policy: one of :data:`POLICIES`.
        seconds: T, by rank, as of :func:`own_work_seconds`.
        product_seconds: M, by rank, likewise.
        columns: L, by rank.
        costs: of resizing and migrating columns.
        tolerance: see :func:`stragglers`.

    Raises:
        ValueError: the policy is unknown.
    """
    if policy not in POLICIES:
        raise ValueError(f"{policy!r} is no policy for late ranks; known are {', '.join(POLICIES)}")
    late = stragglers(seconds, tolerance=tolerance) if policy != "none" else ()
    if not late:
        return dataclasses.replace(left_alone(seconds, "no rank is late"), stragglers=())

    def expected(decision: SemiDecision) -> float:
        return semi_seconds(decision, seconds, product_seconds, columns, costs=costs)

    found = list(_candidates(policy, late, seconds, product_seconds, columns, help_fixed=costs.help_fixed))
    if policy == "semi":
        found.insert(0, decide_semi(seconds, product_seconds, columns, costs=costs, tolerance=tolerance))
    least = min(map(expected, found))
    best = min((d for d in found if expected(d) <= least * (1 + _NEAR)), key=lambda d: sum(d.pruned))
    before, after = max(seconds), expected(best)
    if after < before * (1 - LEAST_GAIN):
        return best
    why = f"rank {late[0]} is late and left alone: {after:.3g} s a step instead of {before:.3g} s"
    return left_alone(seconds, why, tolerance=tolerance)


@dataclasses.dataclass(slots=True, kw_only=True)
class WorkloadTrial:
    """Decisions of a tensor group, each on trial until it has helped.

    The expected seconds leave out what no product tells: packing, larger messages, ranks that are the
    slowest in turn.  So the steps after a decision are compared with those before.  One that has not made
    them shorter by :data:`LEAST_GAIN` is taken back, until the ranks' seconds have changed by a tenth, and
    by twice as much after each further trial in vain.

    Attributes:
        policy: one of :data:`POLICIES`.
        tolerance: see :func:`stragglers`.
        in_force: the newest decision; None before the first.
        awaits_seconds: True if the ranks have yet to tell what the newest decision has changed.
    """

    policy: str
    tolerance: float = TOLERANCE
    in_force: SemiDecision | None = None
    awaits_seconds: bool = False
    _own: tuple[float, ...] = ()
    """T of each rank's own work, of which the decision in force was made."""
    _without: float = 0.0
    """Seconds of a step without it."""
    _moved: bool = False
    _in_vain: tuple[float, ...] = ()
    """T of each rank's own work in the last trial in vain."""
    _failed: int = 0
    """Trials in vain since the last that was not."""

    def move(self) -> None:
        """Layers have come or gone: seconds of others tell nothing about the decision in force."""
        self._moved = self.awaits_seconds = True

    def decide(
        self,
        seconds: Sequence[float],
        product_seconds: Sequence[float],
        columns: Sequence[int],
        *,
        step_seconds: float,
        costs: Callable[[], MoveCosts],
    ) -> SemiDecision:
        """The decision from now on: :func:`decide_workload`'s, the one in force, or none.

        Args:
            seconds: T, by rank, measured under the decision in force.
            product_seconds: M, by rank, likewise.
            columns: L, by rank.
            step_seconds: of a whole step, waiting included, likewise.
            costs: of resizing and migrating; measured where a rank is late.
        """
        own, products = own_work_seconds(seconds, product_seconds, columns, self.in_force)
        moved, judged = self._moved, self.awaits_seconds and not self._moved
        self._moved = self.awaits_seconds = False
        acted = self.in_force is not None and self.in_force.acts
        if self.in_force is not None and acted:
            if judged and step_seconds > self._without * (1 - LEAST_GAIN):
                # The ranks may have changed meanwhile: without the decision, they tell.
                self._in_vain, self._failed, self.awaits_seconds = self._own, self._failed + 1, True
                why = "steps are no shorter than before: late ranks are left alone"
                self.in_force = left_alone(self._own, why, tolerance=self.tolerance)
                return self.in_force
            self._failed = 0 if judged else self._failed
            if not moved and not any(map(mean_is_stale, self._own, own)):
                return self.in_force
        elif self._failed:
            change = min(_LARGEST_CHANGE, 0.1 * 2 ** (self._failed - 1))
            if not any(mean_is_stale(*pair, change=change) for pair in zip(self._in_vain, own, strict=True)):
                why = "ranks are as late as when it did not help: they are left alone"
                self.in_force = left_alone(own, why, tolerance=self.tolerance)
                return self.in_force
        late = stragglers(own, tolerance=self.tolerance)
        self.in_force = decide_workload(
            self.policy,
            own,
            products,
            columns,
            costs=costs() if late else MoveCosts(),
            tolerance=self.tolerance,
        )
        if self.in_force.acts:
            self._without = self._without + max(own) - max(self._own) if acted else step_seconds
            self._own, self.awaits_seconds = own, True
        return self.in_force


def left_alone(seconds: Sequence[float], why: str, *, tolerance: float = TOLERANCE) -> SemiDecision:
    """The decision to do nothing about late ranks."""
    none = (0,) * len(seconds)
    late = stragglers(seconds, tolerance=tolerance)
    return SemiDecision(stragglers=late, migrated=none, pruned=none, why=why)


def _candidates(
    policy: str,
    late: tuple[int, ...],
    seconds: Sequence[float],
    product_seconds: Sequence[float],
    columns: Sequence[int],
    *,
    help_fixed: float,
) -> Iterator[SemiDecision]:
    """Candidates of a policy: all of the excess, or of the x slowest down to a level, for each x."""
    none = (0,) * len(seconds)

    def excess(reference: float | None) -> tuple[int, ...]:
        ratios = resize_ratios(seconds, product_seconds, reference_seconds=reference)
        return tuple(excess_columns(columns[r], ratios[r]) if r in late else 0 for r in range(len(seconds)))

    def candidate(moved: Sequence[int], out: Sequence[int]) -> SemiDecision:
        parts = [
            f"{what}, {', '.join(f'rank {rank}: {counts[rank]} of {columns[rank]} columns' for rank in late)}"
            for what, counts in (("computed by others", moved), ("left out", out))
            if any(counts)
        ]
        return SemiDecision(stragglers=late, migrated=tuple(moved), pruned=tuple(out), why="; ".join(parts))

    if policy in {"resize", "semi"}:
        yield candidate(none, excess(None))
    if policy not in {"migrate", "semi"}:
        return
    whole = excess(min(seconds))
    yield candidate(whole, none)
    for x in range(len(late) + 1):
        parts = excess(level_seconds(seconds, product_seconds, columns, late[:x], help_fixed=help_fixed))
        # Of the x slowest, those faster than the level hand over one column, so that they do not help.
        moved = [min(whole[rank], max(1, part)) if rank in late[:x] else 0 for rank, part in enumerate(parts)]
        yield candidate(moved, none)
        if policy == "semi":
            yield candidate(moved, [count - part for count, part in zip(whole, moved, strict=True)])
