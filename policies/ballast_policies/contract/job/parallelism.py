"""How many ranks work at each position of the pipeline, and what they do about slow ones."""

import enum

from pydantic import Field

from ballast_policies.contract.model import Settings


class StragglerPolicy(enum.StrEnum):
    """What a tensor-parallel group does about ranks that are late."""

    NONE = "none"
    RESIZE = "resize"
    MIGRATE = "migrate"
    SEMI = "semi"


class Selection(enum.StrEnum):
    """Which columns a late rank skips."""

    PRIORITY = "priority"
    RANDOM = "random"


class Imputation(enum.StrEnum):
    """What replaces a gradient that is not computed."""

    ZERO = "zero"
    AVERAGE = "average"
    SAME = "same"


class StragglersConfig(Settings):
    """What a tensor-parallel group does about ranks that are late."""

    policy: StragglerPolicy = StragglerPolicy.NONE
    """``none``; ``resize``: a late rank skips columns (some accuracy is lost); ``migrate``: other ranks
    compute its columns (nothing is lost); ``semi``: the cheaper split of both."""
    selection: Selection = Selection.PRIORITY
    """Which columns are skipped: ``priority``, those whose weights change least, or ``random`` ones."""
    differentiated: bool = False
    """Whether more is skipped in layers that change little, and less in the others."""
    imputation: Imputation = Imputation.ZERO
    """What replaces a gradient that is not computed: ``zero``, ``average``, or the ``same`` as last time."""
    epoch_steps: int = Field(20, ge=1, le=2**31 - 1)
    """Steps between two choices of columns."""
    tolerance: float = Field(0.05, ge=0, le=1000)
    """A rank is late where it is slower than the fastest by more than this fraction."""


class ParallelismConfig(Settings):
    """How many ranks work at each position of the pipeline: ``tensor`` x ``data``."""

    tensor: int = Field(1, ge=1, le=1024)
    """Ranks that share the matrices of each layer."""
    data: int = Field(1, ge=1, le=1024)
    """Replicas of the pipeline; each takes its share of the microbatches."""
    zero_stage: int = Field(0, ge=0, le=3)
    """What the replicas (``data``) have a part of each instead of all: 0, nothing; 1, the optimizer's state
    (ZeRO-1): each updates its part of the weights and gets the other parts; 2, the gradients, too (ZeRO-2):
    they are summed after each microbatch instead of each step; 3, the weights, too (ZeRO-3): those of a layer
    are gathered for each of its forwards and backwards, one layer at a time."""
    gpus_per_pod: int | None = Field(None, ge=1, le=1024)
    """GPUs of each pod, one process for each: as many as a node has, so that its ranks reach each other over
    NVLink and shared memory. The job has, takes and releases whole pods. Absent: ``tensor``, so
    that a tensor group is on one node."""
    scatter_gather: bool = True
    """Whether each tensor-parallel rank sends its part of the activations between stages, which the
    receivers put together."""
    stragglers: StragglersConfig = Field(default_factory=StragglersConfig)
    """What a tensor-parallel group does about slow ranks."""

    @property
    def ranks_per_position(self) -> int:
        """Ranks at one position of the pipeline."""
        return self.tensor * self.data

    @property
    def optimizer_shares(self) -> int:
        """How many replicas share a layer's optimizer."""
        return self.data if self.zero_stage else 1

    @property
    def gradient_shares(self) -> int:
        """How many replicas share a layer's gradients."""
        return self.data if self.zero_stage >= 2 else 1

    @property
    def weight_shares(self) -> int:
        """How many replicas share a layer's weights."""
        return self.data if self.zero_stage >= 3 else 1

    @property
    def ranks_per_pod(self) -> int:
        """Ranks of each pod, and its GPUs."""
        return self.gpus_per_pod or self.tensor
