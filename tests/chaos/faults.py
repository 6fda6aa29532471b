"""Sequences of faults; their kinds stand in ``kinds/``, by what goes wrong."""

import dataclasses
import random
from collections.abc import Iterable

from tests.chaos.kinds import jobs, nodes, operator, pods  # noqa: F401 - they register their faults
from tests.chaos.kinds.registry import KINDS


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``ticks`` of peace before it, and a number that chooses victim and length."""

    kind: str
    number: int
    ticks: int


def sequence(seed: int, count: int, kinds: Iterable[str] = KINDS) -> tuple[Fault, ...]:
    """The faults of ``seed``: the same each time. Every kind comes before any comes twice."""
    chance = random.Random(seed)
    names, known = list[str](), sorted(kinds)
    while len(names) < count:
        names += chance.sample(known, len(known))
    return tuple(Fault(name, chance.randrange(10_000), chance.randint(1, 6)) for name in names[:count])
