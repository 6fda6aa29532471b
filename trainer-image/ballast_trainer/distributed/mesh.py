"""The ranks of a job as a mesh of three axes: pipeline x data x tensor.

World rank = (pipeline position x data + replica) x tensor + t.  So the ranks of a tensor group, which
communicate in every layer, are neighbours; stages are numbered by pipeline position, the same in every
column of the mesh.
"""

import dataclasses

from ballast_policies.contract.job.job import JobConfig

from ballast_trainer.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's coordinates in the mesh."""

    position: int
    data: int
    tensor: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks that share each layer's matrices, and replicas of the pipeline, by the configuration."""

    tensor: int = 1
    data: int = 1

    @classmethod
    def of(cls, config: JobConfig) -> "Mesh":
        """Mesh of a job."""
        return cls(tensor=config.parallelism.tensor, data=config.parallelism.data)

    @property
    def column(self) -> int:
        """Ranks at one pipeline position."""
        return self.tensor * self.data

    def positions(self, ranks: int) -> int:
        """Pipeline positions of this many ranks. Raises ConfigurationError: they do not fill the mesh."""
        if ranks % self.column:
            raise ConfigurationError(
                "parallelism",
                f"{ranks} ranks are no multiple of tensor {self.tensor} x data {self.data}. "
                f"To fix: start {self.column}, {2 * self.column}, ... ranks",
            )
        return ranks // self.column

    def place(self, rank: int) -> Place:
        """Coordinates of a world rank."""
        return Place(
            position=rank // self.column,
            data=rank // self.tensor % self.data,
            tensor=rank % self.tensor,
        )

    def column_ranks(self, position: int) -> range:
        """World ranks at a pipeline position."""
        return range(position * self.column, (position + 1) * self.column)

    def lines(self, axis: str, ranks: int) -> tuple[tuple[int, ...], ...]:
        """The groups of world ranks along ``axis`` (a field of :class:`Place`), in one order everywhere."""
        found: dict[Place, list[int]] = {}
        for rank in range(ranks):
            found.setdefault(dataclasses.replace(self.place(rank), **{axis: 0}), []).append(rank)
        return tuple(tuple(line) for line in found.values())
