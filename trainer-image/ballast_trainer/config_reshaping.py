"""When a job changes its shape: the ``rebalance`` and ``repack`` of its configuration."""

import dataclasses

from ballast_trainer.config_reading import one_of, require


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceConfig:
    """When layers move between the ranks of a job."""

    enabled: bool = True
    every_steps: int = 20
    min_gain: float = 0.05
    """Move only where the predicted step time falls by at least this fraction."""
    balancer: str = "exact"
    """``exact``: the best partition there is; ``diffusion``: chain moves from the one in force; ``network``:
    the best over links whose transfers are measured; ``deepspeed``: its rule, for reference."""
    by: str = "time"
    """What is spread evenly: measured ``time``, or ``parameters``, which need no measuring."""
    memory_bytes: int | None = None
    """What parameters, gradients, optimizer state and the activations of the microbatches in flight may
    take on a rank; None: no limit."""

    def __post_init__(self) -> None:
        one_of("rebalance.balancer", self.balancer, ("deepspeed", "diffusion", "exact", "network"))
        one_of("rebalance.by", self.by, ("time", "parameters"))
        require(
            (self.balancer, self.by) != ("network", "parameters"),
            "rebalance.by",
            "'parameters' cannot be weighed against seconds on links. To fix: by: time, or balancer: exact",
        )
        if self.memory_bytes is not None:
            require(self.memory_bytes >= 1, "rebalance.memoryBytes", f"{self.memory_bytes} is below 1")
        require(self.every_steps >= 1, "rebalance.everySteps", f"{self.every_steps} is below 1")
        require(self.min_gain >= 0, "rebalance.minGain", f"{self.min_gain} is below 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepackConfig:
    """When the job offers ranks back."""

    enabled: bool = False
    min_stages: int = 1
    target_stages: int | None = None
    """Offer to go on with this many positions of the pipeline; None: with the fewest that are enough."""
    every_steps: int = 20
    max_slowdown: float = 0.1
    """Offer where the predicted step time after is at most before x (1 + maxSlowdown)."""

    def __post_init__(self) -> None:
        require(self.min_stages >= 1, "repack.minStages", f"{self.min_stages} is below 1")
        if self.target_stages is not None:
            require(
                self.target_stages >= self.min_stages,
                "repack.targetStages",
                f"{self.target_stages} is below minStages {self.min_stages}",
            )
        require(self.every_steps >= 1, "repack.everySteps", f"{self.every_steps} is below 1")
        require(self.max_slowdown >= 0, "repack.maxSlowdown", f"{self.max_slowdown} is below 0")
