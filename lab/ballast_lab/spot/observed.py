"""Preemptions that a replay itself has seen: its policy knows no others, and none of the future."""

import dataclasses

from ballast_policies.prices.hazard import Hazard

from ballast_lab.prices.offers import Pool


@dataclasses.dataclass(slots=True)
class Observed:
    """Preemptions and machine hours by pool and by class, which is a GPU type of a cloud.

    Attributes:
        version: rises with every observation.
    """

    pools: dict[Pool, Hazard] = dataclasses.field(default_factory=dict)
    classes: dict[tuple[str, str], Hazard] = dataclasses.field(default_factory=dict)
    version: int = 0

    def add(self, pool: Pool, hazard: Hazard) -> None:
        """Machines of a pool were rented for some time, and perhaps taken away."""
        kind = (pool.cloud, pool.gpu_type)
        self.pools[pool] = self.pools.get(pool, Hazard()).plus(hazard)
        self.classes[kind] = self.classes.get(kind, Hazard()).plus(hazard)
        self.version += 1

    def per_hour(self, pool: Pool) -> float:
        """The rate that is expected of a pool, among those of its class."""
        own = self.pools.get(pool, Hazard())
        return own.per_hour_in_class(self.classes.get((pool.cloud, pool.gpu_type), Hazard()))
