"""The difference between two partitions, as the moves that lead from one to the other."""

import dataclasses

from ballast_policies.planning.partition import Partition, PlanningError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One layer from one rank to another."""

    layer: int
    from_rank: int
    to_rank: int


def moves_between(before: Partition, after: Partition) -> tuple[Move, ...]:
    """The layers whose rank changes, by layer; both partitions count ranks in the same numbering.

    Raises:
        PlanningError: the partitions are of different models.
    """
    if before.layers != after.layers:
        raise PlanningError(
            f"partitions of {before.layers} and of {after.layers} layers have no moves between"
        )
    found = []
    for layer in range(before.layers):
        source, target = before.rank_of(layer), after.rank_of(layer)
        if source != target:
            found.append(Move(layer=layer, from_rank=source, to_rank=target))
    return tuple(found)
