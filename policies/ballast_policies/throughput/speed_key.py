"""Where a gang's speed was measured: a speed there is never taken for one elsewhere."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ballast_policies.throughput.track import Estimate

_OVER, _NODES, _WITH, _TIMES, _AND = " over ", " nodes", " with ", " x ", " + "


class SpeedKey(NamedTuple):
    """GPUs that a gang was on.

    Attributes:
        gpus: (GPU type, how many of it), by type.
        nodes: that they were on; None: the gang was in several pools.
        partner: kind of the job that had its GPU as well; empty: none did.
    """

    gpus: tuple[tuple[str, int], ...]
    nodes: int | None = 1
    partner: str = ""

    @classmethod
    def of(cls, gpu_type: str, gpus: int, nodes: int = 1) -> "SpeedKey":
        """A gang in one pool."""
        return cls(((gpu_type, gpus),), max(1, nodes))

    @classmethod
    def of_types(cls, counts: Iterable[tuple[str, int]]) -> "SpeedKey":
        """A gang in several pools, by its numbers of GPUs of each type, whatever pools these are."""
        total: Counter[str] = Counter()
        for gpu_type, count in counts:
            total[gpu_type] += count
        return cls(tuple(sorted(total.items())), nodes=None)

    @classmethod
    def read(cls, text: str, gpus: int) -> "SpeedKey":
        """From its text (:meth:`__str__`) and the number of its GPUs, as both are saved.

        Raises:
            ValueError: it is none.
        """
        if _TIMES in text:
            parts = (part.partition(_TIMES) for part in text.split(_AND))
            return cls.of_types((gpu_type, int(count)) for count, _, gpu_type in parts)
        name, _, partner = text.partition(_WITH)
        gpu_type, _, rest = name.partition(_OVER)
        nodes = rest.removesuffix(_NODES)
        at = cls.of(gpu_type, gpus, int(nodes)) if nodes.isdecimal() else cls.of(name, gpus)
        return at._replace(partner=partner)

    @property
    def total(self) -> int:
        """GPUs in all."""
        return sum(count for _, count in self.gpus)

    @property
    def alone_in_pool(self) -> tuple[str, int] | None:
        """(GPU type, GPUs) of a gang in one pool that shared no GPU; None: it was another."""
        return self.gpus[0] if self.nodes is not None and not self.partner else None

    def __str__(self) -> str:
        """As people read it: ``v100``, ``v100 over 2 nodes``, ``v100 with KIND``, ``2 x k80 + 2 x v100``."""
        if self.nodes is None:
            return _AND.join(f"{count}{_TIMES}{gpu_type}" for gpu_type, count in self.gpus)
        over = f"{_OVER}{self.nodes}{_NODES}" if self.nodes > 1 else ""
        return self.gpus[0][0] + over + (f"{_WITH}{self.partner}" if self.partner else "")


Speeds = Mapping[SpeedKey, Estimate]
"""Where -> what is known of the speed there."""
