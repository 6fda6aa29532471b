"""A configuration: GPUs that a job may run on, and how fast it is there.

The one definition that policies, simulator, operator and ``ballast allocate`` share. A fixed job has one for
each GPU type; an elastic job has several sizes, and may mix types.
"""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.contract.errors import ContractError, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """GPUs and speed of one way to run a job.

    Attributes:
        name: unique among the job's configurations.
        gpus: GPU type -> GPUs, whole numbers; at least one GPU in all. A type with 0 is as one left out.
        throughput: steps (or other units of work) per second of the whole gang; 0: it cannot run so.
        usd_per_step: what a step costs besides the GPUs, e.g. to read its data from another region.

    Raises:
        ContractError: a value is impossible; paths are relative to the configuration.
    """

    name: str
    gpus: Mapping[str, int]
    throughput: float
    usd_per_step: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            Problem(f"gpus.{gpu_type}", f"{count} is not a whole number of GPUs, 0 or more")
            for gpu_type, count in self.gpus.items()
            if not (count >= 0 and count == int(count))
        ]
        if not problems and not any(self.gpus.values()):
            problems.append(Problem("gpus", "there is no GPU. To fix: give at least one"))
        if not (self.throughput >= 0 and math.isfinite(self.throughput)):
            problems.append(Problem("throughput", f"{self.throughput} must be at least 0 and finite"))
        if not (self.usd_per_step >= 0 and math.isfinite(self.usd_per_step)):
            problems.append(Problem("usd_per_step", f"{self.usd_per_step} must be at least 0 and finite"))
        if not self.name:
            problems.append(Problem("name", "expected a text, got ''"))
        if problems:
            raise ContractError(problems)

    def __hash__(self) -> int:
        return hash((self.name, self.throughput))

    @classmethod
    def of_one_type(cls, gpu_type: str, gpus: int, throughput: float) -> "Configuration":
        """``gpus`` GPUs of one type, named by type and number."""
        return cls(name=f"{gpus} x {gpu_type}", gpus={gpu_type: gpus}, throughput=throughput)

    @property
    def total(self) -> int:
        """GPUs of all types."""
        return sum(self.gpus.values())

    def fits(self, capacity: Mapping[str, int]) -> bool:
        """Whether there are GPUs enough of each type, if no other job has any."""
        return all(count <= capacity.get(gpu_type, 0) for gpu_type, count in self.gpus.items() if count)
