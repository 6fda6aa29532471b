"""When a job changes its shape while it trains: layers that move between ranks, ranks that are released."""

import enum
from typing import Annotated

from pydantic import Field

from ballast_policies.contract.conditions import Rule, absent, at, row
from ballast_policies.contract.model import Named, Settings
from ballast_policies.planning.balancers.registry import BALANCERS, DEFAULT_BALANCER


class BalanceBy(enum.StrEnum):
    """What is spread evenly over the ranks."""

    TIME = "time"
    PARAMETERS = "parameters"


class RebalanceConfig(Settings):
    """When layers move between the ranks of a job, while it trains."""

    RULES = (
        Rule(
            condition=row("balancer", BALANCERS, lambda kind: kind.balances_parameters)
            | (at("by") == BalanceBy.TIME),
            field="by",
            reason="this balancer weighs seconds on links, which parameters cannot be compared with",
            fix="by: time, or balancer: exact",
        ),
        Rule(
            condition=row("balancer", BALANCERS, lambda kind: kind.limits_memory) | absent("memory_bytes"),
            field="balancer",
            reason="this balancer has no limit of memory",
            fix="leave memoryBytes out, or balancer: exact",
        ),
    )

    enabled: bool = True
    """Whether layers move at all."""
    every_steps: int | None = Field(None, ge=1, le=2**31 - 1)
    """Steps between two decisions. Absent: a decision is due when the steps since the last one have lost as
    much time to uneven ranks as a decision and a move cost; of a schedule without a flush, every 20
    steps."""
    min_gain: float = Field(0.05, ge=0, le=1)
    """Layers move where the predicted step time falls by at least this fraction; where what is measured is
    noisy, by as much more as noise may feign, up to 0.1. 0: whatever is gained."""
    balancer: Annotated[str, Field(max_length=253), Named(BALANCERS)] = DEFAULT_BALANCER
    """How the partition is chosen: a name under [Balancers](#balancers), or ``prefix.name`` of a distribution
    that is installed in the operator's and the trainer's image."""
    by: BalanceBy = BalanceBy.TIME
    """What is spread evenly: measured ``time``, or ``parameters``, which need no measuring."""
    memory_bytes: int | None = Field(None, ge=1, le=2**53)
    """Limit of what parameters, gradients, optimizer state, and the measured activations and messages of the
    microbatches in flight take on a rank, after rebalances and repacks. Absent: no limit."""


class RepackConfig(Settings):
    """When the job releases GPUs, while it trains."""

    RULES = (
        Rule(
            condition=at("min_stages") <= at("target_stages"),
            field="target_stages",
            reason="targetStages is below minStages",
            fix="raise targetStages or lower minStages",
        ),
        Rule(
            condition=absent("target_stages") | (at("enabled") == True),  # noqa: E712 - a comparison as a value
            field="target_stages",
            reason="repack.enabled is false: targetStages has no effect",
            fix="enabled: true, or leave targetStages out",
        ),
    )

    enabled: bool = False
    """Whether it does."""
    min_stages: int = Field(1, ge=1, le=1024)
    """Fewest stages that it may shrink to."""
    target_stages: int | None = Field(None, ge=1, le=1024)
    """Continue on this many positions of the pipeline, or on all. Absent: on the fewest that are enough."""
    every_steps: int = Field(20, ge=1, le=2**31 - 1)
    """Steps between two decisions."""
    max_slowdown: float = Field(0.1, ge=0, le=100)
    """Shrink where the predicted step time is at most that of before layers got cheaper x (1 + this)."""
