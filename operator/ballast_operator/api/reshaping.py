"""When a job changes its shape while it trains: ``spec.rebalance`` and ``spec.repack``."""

import enum
from typing import Annotated

from pydantic import Field

from ballast_operator.api.base import ApiModel, Rule

_Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Stages = Annotated[int, Field(ge=1, le=1024)]


class Balancer(enum.StrEnum):
    """How the trainer chooses which rank holds which layers."""

    EXACT = "exact"
    """The best partition there is."""
    DIFFUSION = "diffusion"
    """Chain moves from the partition in force."""
    NETWORK = "network"
    """The best over links whose transfers are measured."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed's rule, for reference."""


class Balanced(enum.StrEnum):
    """What is spread evenly over the ranks."""

    TIME = "time"
    """The layers' measured times."""
    PARAMETERS = "parameters"
    """Their parameters, which need no measuring."""


class Rebalance(ApiModel):
    """When layers move between the ranks of a job, while it trains."""

    # The API server also asks these of the default, {}, before it fills in the fields' own: hence has().
    RULES = (
        Rule(
            "!has(self.balancer) || !has(self.by) || self.balancer != 'network' || self.by == 'time'",
            "parameters cannot be weighed against seconds on links. To fix: by: time, or balancer: exact",
            field=".by",
            holds=lambda rebalance: (
                rebalance.balancer is not Balancer.NETWORK or rebalance.by is Balanced.TIME
            ),
        ),
        Rule(
            "!has(self.balancer) || self.balancer != 'deepspeed' || !has(self.memoryBytes)",
            "balancer deepspeed knows no memoryBytes. To fix: leave memoryBytes out, or balancer: exact",
            field=".balancer",
            holds=lambda rebalance: (
                rebalance.balancer is not Balancer.DEEPSPEED or rebalance.memory_bytes is None
            ),
        ),
    )

    enabled: bool = True
    """Whether layers move at all."""
    every_steps: _Steps = 20
    """Steps between two looks at the layers' measured times."""
    min_gain: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Move where the predicted step time falls by at least this fraction."""
    balancer: Balancer = Balancer.EXACT
    """``exact``: the best partition there is; ``diffusion``: chain moves from the one in force; ``network``:
    the best over links whose transfers are measured, with 1F1B; ``deepspeed``: its rule, for reference."""
    by: Balanced = Balanced.TIME
    """What is spread evenly: measured ``time``, or ``parameters``, which need no measuring."""
    memory_bytes: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """What parameters, gradients, optimizer state and the measured activations of the microbatches in flight
    may take on a rank, after rebalances and repacks. Absent: no limit."""


class Repack(ApiModel):
    """When the job hands GPUs back, while it trains."""

    RULES = (
        Rule(
            "!has(self.targetStages) || !has(self.minStages) || self.minStages <= self.targetStages",
            "targetStages is below minStages. To fix: raise targetStages or lower minStages",
            field=".targetStages",
            holds=lambda repack: repack.target_stages is None or repack.min_stages <= repack.target_stages,
        ),
    )

    enabled: bool = False
    """Whether it does."""
    min_stages: _Stages = 1
    """Fewest stages that it may shrink to."""
    target_stages: _Stages | None = None
    """Go on with this many positions of the pipeline, or with all. Absent: the fewest that are enough."""
    every_steps: _Steps = 20
    """Steps between two considerations."""
    max_slowdown: Annotated[float, Field(ge=0, le=100)] = 0.1
    """Shrink where the predicted step time is at most that of before layers got cheaper x (1 + this)."""
