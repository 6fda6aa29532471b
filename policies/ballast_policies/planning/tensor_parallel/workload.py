"""Policies for the stragglers of a tensor-parallel group: none, resize, migrate, or both.

Seconds are measured while earlier decisions are in force; they are first converted to the
seconds of every rank's own work alone, so that a successful decision does not undo itself.
"""

from collections.abc import Sequence

from ballast_policies.planning.tensor_parallel.resizing import resize_ratios
from ballast_policies.planning.tensor_parallel.semi import (
    MoveCosts,
    SemiDecision,
    decide_semi,
)
from ballast_policies.planning.tensor_parallel.stragglers import TOLERANCE, stragglers

POLICIES = ("none", "resize", "migrate", "semi")
"""No change; ZERO-resizing of all excess columns; migration of all of them; SEMI's split."""


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

    ``resize`` brings late ranks to the mean of the group (equation 1), ``migrate`` to the fastest rank,
    ``semi`` is Algorithm 2.

    Args:
        policy: one of :data:`POLICIES`.
        seconds: T, by rank, as of :func:`own_work_seconds`.
        product_seconds: M, by rank, likewise.
        columns: L, by rank.
        costs: of resizing and migrating columns; read by ``semi``.
        tolerance: see :func:`stragglers`.

    Raises:
        ValueError: the policy is unknown.
    """
    if policy not in POLICIES:
        raise ValueError(f"{policy!r} is no policy for late ranks; known are {', '.join(POLICIES)}")
    if policy == "semi":
        return decide_semi(
            seconds,
            product_seconds,
            columns,
            costs=costs,
            tolerance=tolerance,
        )
    late = stragglers(seconds, tolerance=tolerance) if policy != "none" else ()
    none = (0,) * len(seconds)
    if not late:
        return SemiDecision(stragglers=(), migrated=none, pruned=none, why="no rank is late")
    reference = None if policy == "resize" else min(seconds)
    ratios = resize_ratios(seconds, product_seconds, reference_seconds=reference)
    excess = tuple(round(columns[rank] * ratios[rank]) if rank in late else 0 for rank in range(len(seconds)))
    words = ", ".join(f"rank {rank}: {excess[rank]} of {columns[rank]} columns" for rank in late)
    if policy == "resize":
        return SemiDecision(stragglers=late, migrated=none, pruned=excess, why=f"left out, {words}")
    return SemiDecision(stragglers=late, migrated=excess, pruned=none, why=f"computed by others, {words}")
