"""SEMI: the parts of the stragglers' work that are pruned and migrated (IV-B, Algorithm 2).

One straggler: the share beta of its L gamma excess columns that migrates makes both ways cost the same,

    O1 + O2(L gamma (1 - beta)) = F1(L gamma beta) + F2(L gamma beta / (e - 1))        equation 2

Several, slowest first: the first x migrate, the others resize; x is the largest with

    f(x) = (T_x - Tmin) - F1(G(x)) - max over y > x of G(x) / (e - x) T_y / L_y > 0    equation 3
    G(x) = sum over k <= x of L_k (T_k - Tmin) / T_k

f is not monotone (a second straggler, once it migrates, is no longer a slow helper), so all x are
tried, where the paper stops at the first f(x) < 0.
"""

import dataclasses
from collections.abc import Collection, Sequence
from math import ceil

import numpy as np

from ballast_policies.planning.tensor_parallel.resizing import excess_columns, resize_ratios

TOLERANCE = 0.05
"""Relative; the paper compares exactly, and then any noise makes all ranks but the fastest stragglers."""


def stragglers(seconds: Sequence[float], *, tolerance: float = TOLERANCE) -> tuple[int, ...]:
    """Ranks slower than the fastest by more than ``tolerance``, slowest first (SEMI, Algorithm 2, line 4)."""
    T = np.asarray(seconds, dtype=float)
    late = np.flatnonzero(T.min() * (1 + tolerance) < T)
    return tuple(int(rank) for rank in late[np.argsort(-T[late], kind="stable")])


def mean_is_stale(seconds_at_last_mean: float, seconds: float, *, change: float = 0.1) -> bool:
    """True where this rank's own time has changed enough for the group to exchange times again.

    The mean needs a collective; each rank watches only itself between two of them (III-A: over 10 %).
    """
    return abs(seconds - seconds_at_last_mean) > change * seconds_at_last_mean


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Seconds of a number of columns: ``fixed + per_column x columns``."""

    fixed: float = 0.0
    per_column: float

    def __call__(self, columns: float) -> float:
        """Seconds."""
        return self.fixed + self.per_column * columns


def fit_cost(columns: Sequence[float], seconds: Sequence[float]) -> LinearCost:
    """The straight line, not falling, nearest to measurements (the pre-test of Algorithm 2, line 1).

    Raises:
        ValueError: fewer than two different column counts.
    """
    if len(set(columns)) < 2:
        raise ValueError(f"a line needs two different column counts, got {list(columns)}")
    slope, fixed = np.polyfit(np.asarray(columns, dtype=float), np.asarray(seconds, dtype=float), 1)
    return LinearCost(fixed=max(0.0, float(fixed)), per_column=max(0.0, float(slope)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """Seconds per step of resizing and migrating, measured before training (Algorithm 2, line 1).

    Attributes:
        resize_fixed: Omega_1.
        resize: Omega_2, of columns left out.
        communicate: Phi_1, of columns sent to helpers and their gradients sent back.
        help_fixed: that a helper pays for further, smaller products, however few columns they have. The paper
            has no such term; at moderate slowness it decides whether migration breaks even.
    """

    resize_fixed: float = 0.0
    resize: LinearCost = dataclasses.field(default_factory=lambda: LinearCost(per_column=0.0))
    communicate: LinearCost = dataclasses.field(default_factory=lambda: LinearCost(per_column=0.0))
    help_fixed: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SemiDecision:
    """Columns that each rank migrates to helpers or prunes.

    Attributes:
        stragglers: ranks that are late, slowest first.
        migrated: by rank, columns that helpers compute; lossless.
        pruned: by rank, columns that no rank computes.
    """

    stragglers: tuple[int, ...]
    migrated: tuple[int, ...]
    pruned: tuple[int, ...]
    why: str

    @property
    def acts(self) -> bool:
        """True if any rank does other work than its own."""
        return any(self.migrated) or any(self.pruned)

    def computed(self, columns: Sequence[int]) -> tuple[float, ...]:
        """Columns by rank that it computes, of its own ``columns`` and of others'.

        Ranks that migrate nothing share the columns that the others migrate.
        """
        helpers = sum(count == 0 for count in self.migrated)
        helped = sum(self.migrated) / helpers if helpers else 0.0
        return tuple(
            own - migrated - pruned + (helped if migrated == 0 else 0.0)
            for own, migrated, pruned in zip(columns, self.migrated, self.pruned, strict=True)
        )


def migrated_share(columns: float, *, ranks: int, costs: MoveCosts, compute: LinearCost) -> float:
    """Beta of equation 2, in [0, 1]; at an end where one way is cheaper throughout.

    Args:
        columns: L gamma, the excess columns of the straggler.
        ranks: e.
        costs: Omega_1, Omega_2 and Phi_1.
        compute: Phi_2, seconds of a helper to compute columns.
    """
    # Leaving all of them out takes so much longer than migrating none; each that migrates takes ``each`` off.
    more = costs.resize_fixed + costs.resize(columns) - costs.communicate.fixed - compute.fixed
    each = costs.resize.per_column + costs.communicate.per_column + compute.per_column / (ranks - 1)
    if more >= columns * each:
        return 1.0
    return more / (columns * each) if more > 0 else 0.0


def migrating_stragglers(
    seconds: Sequence[float],
    columns: Sequence[float],
    *,
    communicate: LinearCost,
    tolerance: float = TOLERANCE,
) -> int:
    """The x of equation 3: how many of the slowest ranks migrate; at least one rank is left to help.

    Args:
        seconds: T, by rank.
        columns: L, by rank.
        communicate: Phi_1.
        tolerance: see :func:`stragglers`.
    """
    late = len(stragglers(seconds, tolerance=tolerance))
    gains = [
        migration_gain(seconds, columns, x, communicate=communicate)
        for x in range(1, min(late, len(seconds) - 1) + 1)
    ]
    return max((x for x, gain in enumerate(gains, start=1) if gain > 0), default=0)


def migration_gain(
    seconds: Sequence[float], columns: Sequence[float], x: int, *, communicate: LinearCost
) -> float:
    """f(x) of equation 3: seconds saved if the x slowest ranks migrate."""
    T, L = np.asarray(seconds, dtype=float), np.asarray(columns, dtype=float)
    order = np.argsort(-T, kind="stable")
    T, L = T[order], L[order]
    least = T[-1]
    moved = float((L[:x] * (T[:x] - least) / T[:x]).sum())
    slowest_helper = float((moved / (len(T) - x) * T[x:] / L[x:]).max())
    return float(T[x - 1] - least) - communicate(moved) - slowest_helper


def level_seconds(
    seconds: Sequence[float],
    product_seconds: Sequence[float],
    columns: Sequence[int],
    givers: Collection[int],
    *,
    help_fixed: float,
) -> float:
    """Seconds that ``givers`` can migrate down to before a helper takes longer than they do.

    The largest t, of helpers h: t = T_h + fixed + M_h / L_h / (e - x) sum over givers of (T_i - t) L_i / M_i.

    Args:
        seconds: T, by rank.
        product_seconds: M, by rank.
        columns: L, by rank.
        givers: the x ranks that migrate and do not help.
        help_fixed: see :class:`MoveCosts`.
    """
    rates = [count / products for count, products in zip(columns, product_seconds, strict=True)]
    helpers = [rank for rank in range(len(seconds)) if rank not in givers]
    given, rate = sum(seconds[i] * rates[i] for i in givers), sum(rates[i] for i in givers)
    shares = [1 / (rates[h] * len(helpers)) for h in helpers]
    return max(
        (seconds[h] + help_fixed + share * given) / (1 + share * rate)
        for h, share in zip(helpers, shares, strict=True)
    )


def decide_semi(
    seconds: Sequence[float],
    product_seconds: Sequence[float],
    columns: Sequence[int],
    *,
    costs: MoveCosts,
    tolerance: float = TOLERANCE,
) -> SemiDecision:
    """Algorithm 2 for the whole group.

    Its line 8 computes the split where T_i = Tmin, that is, on every rank but the straggler; the straggler is
    meant.  Every straggler is to reach the fastest rank.  Whether that saves more than it costs, the paper
    does not check; :func:`.workload.decide_workload` does.

    Args:
        seconds: T, by rank.
        product_seconds: M, by rank, of the matrix products whose columns can move.
        columns: L, by rank.
        costs: Omega_1, Omega_2 and Phi_1.
        tolerance: see :func:`stragglers`.
    """
    late = stragglers(seconds, tolerance=tolerance)
    migrated, pruned = [0] * len(seconds), [0] * len(seconds)
    ratios = resize_ratios(seconds, product_seconds, reference_seconds=min(seconds))
    excess = {rank: excess_columns(columns[rank], ratios[rank]) for rank in late}
    if len(late) == 1:
        (rank,) = late
        helper = min(range(len(seconds)), key=lambda r: seconds[r])
        share = migrated_share(
            excess[rank],
            ranks=len(seconds),
            costs=costs,
            compute=LinearCost(per_column=product_seconds[helper] / columns[helper]),
        )
        migrated[rank] = round(excess[rank] * share)
        pruned[rank] = excess[rank] - migrated[rank]
        why = f"rank {rank} is late: {share:.0%} of its {excess[rank]} excess columns migrate"
    else:
        x = migrating_stragglers(seconds, columns, communicate=costs.communicate, tolerance=tolerance)
        for place, rank in enumerate(late):
            (migrated if place < x else pruned)[rank] = excess[rank]
        why = f"{len(late)} ranks are late: the {x} slowest migrate, the others resize"
    return SemiDecision(stragglers=late, migrated=tuple(migrated), pruned=tuple(pruned), why=why)


def semi_seconds(
    decision: SemiDecision,
    seconds: Sequence[float],
    product_seconds: Sequence[float],
    columns: Sequence[int],
    *,
    costs: MoveCosts,
) -> float:
    """Seconds of a step under a decision: of the slowest rank, and of sending columns, which all wait for.

    Late ranks compute less and pay Omega_1 + Omega_2 of the pruned columns; helpers share those that migrate,
    and pay for products of their own for them.

    Args:
        decision: what would be in force.
        seconds: T, by rank.
        product_seconds: M, by rank.
        columns: L, by rank.
        costs: Omega_1, Omega_2 and Phi_1.
    """
    moved, done = sum(decision.migrated), decision.computed(columns)
    expected = []
    for rank, (total, products) in enumerate(zip(seconds, product_seconds, strict=True)):
        pruned = decision.pruned[rank]
        resizing = costs.resize_fixed + costs.resize(pruned) if pruned else 0.0
        helping = costs.help_fixed if moved and not decision.migrated[rank] else 0.0
        expected.append(total + products * (done[rank] / columns[rank] - 1.0) + resizing + helping)
    return max(expected) + (costs.communicate(moved) if moved else 0.0)


def helper_columns(
    migrated: int, *, ranks: int, straggler: int, rank: int, migrating: Collection[int] = ()
) -> range:
    """Columns of the ``migrated`` ones that ``rank`` computes.

    r' = (r + e - r_k) mod e in 1..e-1, m = ceil(L_mig / (e - 1)): columns m (r' - 1) to m r' - 1,
    clipped.  Empty for the straggler itself.  Where several ranks migrate they do not help each other:
    r' then counts the e - x helpers alone, and m = ceil(L_mig / (e - x)), as in equation 3.

    Args:
        migrated: L_mig.
        ranks: e.
        straggler: r_k.
        rank: r.
        migrating: all ranks that migrate, with or without ``straggler``.

    Raises:
        ValueError: ranks outside the group, or a group without a rank that can help.
    """
    if ranks < 2 or not (0 <= straggler < ranks and 0 <= rank < ranks):
        raise ValueError(f"rank {rank} and straggler {straggler} must be two of {ranks} ranks (at least 2)")
    absent = {straggler, *migrating}
    positions = [p for p in range(1, ranks) if (straggler + p) % ranks not in absent]
    if not positions:
        raise ValueError(f"all of {ranks} ranks migrate: none is left to help")
    if rank in absent:
        return range(0)
    helper = positions.index((rank + ranks - straggler) % ranks)
    share = ceil(migrated / len(positions))
    return range(min(migrated, share * helper), min(migrated, share * (helper + 1)))
