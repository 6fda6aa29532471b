"""``ballast whatif`` and gangs that only several pools together can hold."""

from collections.abc import Sequence

from ballast_policies.allocation.problem import Problem
from ballast_policies.rounds import with_mixtures
from ballast_policies.simulator.whatif import Setup

from ballast_operator.allocator.problem.snapshot import Snapshot


def with_large_gangs(
    problem: Problem, snapshot: Snapshot, sides: Sequence[Setup]
) -> tuple[Problem, tuple[str, ...]]:
    """(the problem with the gangs that only several pools hold, what has to be said of them)."""
    large = sorted(name for name, gang in snapshot.mixed.items() if not gang.fits_one_pool)
    if not large:
        return problem, ()
    for side in sides:
        found = with_mixtures(problem, snapshot.mixed, side.policy, agnostic=side.agnostic)
        if found is problem:
            text = f"{side.policy}{' (heterogeneity-agnostic)' if side.agnostic else ''}"
            return problem, (f"{', '.join(large)}: no pool holds it, so it has no share under {text}",)
    return found, (f"{', '.join(large)}: over several pools, as they are now",)
