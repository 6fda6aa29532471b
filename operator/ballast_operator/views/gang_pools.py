"""What is known of the pools of one gang."""

import dataclasses
from collections.abc import Mapping

from ballast_policies.rounds import Placement

from ballast_operator.views.assignment import UNKNOWN_POOL, PoolInfo


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangPools:
    """The pools of a gang.

    Attributes:
        first: that of rank 0.
        others: pool -> the same, of a gang in several, the first among them; empty: it is in one.
    """

    first: PoolInfo = UNKNOWN_POOL
    others: Mapping[str, PoolInfo] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, placement: Placement | None, pools: Mapping[str, PoolInfo]) -> "GangPools":
        """Those of ``placement``, of which nothing may be known."""
        if placement is None:
            return cls(first=pools.get("", UNKNOWN_POOL))
        return cls(
            first=pools.get(placement.pool, UNKNOWN_POOL),
            others={part.pool: pools.get(part.pool, UNKNOWN_POOL) for part in placement.parts},
        )

    def named(self, pool: str) -> PoolInfo:
        """The gang's pool of this name."""
        return self.others.get(pool, self.first)


UNKNOWN_POOLS = GangPools()
"""A gang of whose pools nothing is known."""
