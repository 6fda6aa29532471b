"""Policies for the stragglers of a tensor-parallel group: none, resize, migrate, or both.

Seconds are measured while earlier decisions are in force; they are first converted to the
seconds of every rank's own work alone, so that a successful decision does not undo itself.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from ballast_policies.planning.tensor_parallel.resizing import excess_columns, resize_ratios
from ballast_policies.planning.tensor_parallel.semi import (
    TOLERANCE,
    MoveCosts,
    SemiDecision,
    decide_semi,
    semi_seconds,
    stragglers,
)

POLICIES = ("none", "resize", "migrate", "semi")
"""No change; ZERO-resizing of all excess columns; migration of all of them; SEMI's split."""

LEAST_GAIN = 0.02
"""Fraction by which a step must be expected to fall: what is gained less than that, noise takes away."""

_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Parts of the excess columns that are tried beside the published splits."""

_NEAR = 0.01
"""Of splits that are expected to take as long, to this fraction, the one that loses least is chosen."""


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

    ``resize`` brings late ranks to the mean of the group (equation 1), ``migrate`` to the fastest rank;
    ``semi`` is the best, by the measured costs, of Algorithm 2's split, of these two, and of parts of the
    excess.  Where none makes a step shorter by :data:`LEAST_GAIN`, nothing is done; the paper does not check.

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

    found = list(_candidates(policy, late, seconds, product_seconds, columns))
    if policy == "semi":
        found.insert(0, decide_semi(seconds, product_seconds, columns, costs=costs, tolerance=tolerance))
    least = min(map(expected, found))
    best = min((d for d in found if expected(d) <= least * (1 + _NEAR)), key=lambda d: sum(d.pruned))
    before, after = max(seconds), expected(best)
    if after < before * (1 - LEAST_GAIN):
        return best
    why = f"rank {late[0]} is late and left alone: {after:.3g} s a step instead of {before:.3g} s"
    return left_alone(seconds, why, tolerance=tolerance)


def measured_no_faster(
    decision: SemiDecision, measured: Sequence[float], before: Sequence[float], *, costs: MoveCosts
) -> bool:
    """True if a step under a decision takes as long as before it: the expected gain has not come true.

    Args:
        decision: in force.
        measured: T under it, by rank.
        before: T before it, by rank.
        costs: of sending columns, which T does not contain.
    """
    moved = sum(decision.migrated)
    return max(measured) + (costs.communicate(moved) if moved else 0.0) >= max(before)


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
) -> Iterator[SemiDecision]:
    """Candidates of a policy: all of the excess moved; for SEMI also parts of it."""
    none = (0,) * len(seconds)

    def excess(reference: float | None) -> tuple[int, ...]:
        ratios = resize_ratios(seconds, product_seconds, reference_seconds=reference)
        return tuple(excess_columns(columns[r], ratios[r]) if r in late else 0 for r in range(len(seconds)))

    def named(counts: tuple[int, ...]) -> str:
        return ", ".join(f"rank {rank}: {counts[rank]} of {columns[rank]} columns" for rank in late)

    if policy in {"resize", "semi"}:
        out = excess(None)
        yield SemiDecision(stragglers=late, migrated=none, pruned=out, why=f"left out, {named(out)}")
    if policy not in {"migrate", "semi"}:
        return
    whole = excess(min(seconds))
    for share in _SHARES if policy == "semi" else (1.0,):
        moved = tuple(round(share * count) for count in whole)
        yield SemiDecision(
            stragglers=late, migrated=moved, pruned=none, why=f"computed by others, {named(moved)}"
        )
        if policy == "semi":
            rest = tuple(count - part for count, part in zip(whole, moved, strict=True))
            why = f"computed by others, {named(moved)}; left out, {named(rest)}"
            yield SemiDecision(stragglers=late, migrated=moved, pruned=rest, why=why)
