"""Balancers: exact, fewest moves, slow links, mixed GPUs, fewer ranks, DeepSpeed's rule."""

from ballast_policies.planning.balancers.fewest_moves import nearest_partition
from ballast_policies.planning.balancers.mixed_gpus import Arrangement, arrange_ranks, partition_by_rank
from ballast_policies.planning.balancers.network import network_aware_partition, steady_period_seconds
from ballast_policies.planning.balancers.registry import deepspeed_partition
from ballast_policies.planning.balancers.several_stages import StagedPipeline, refine
from ballast_policies.planning.balancers.subset import KeptRanks, RankSubsets

__all__ = [
    "Arrangement",
    "KeptRanks",
    "RankSubsets",
    "StagedPipeline",
    "arrange_ranks",
    "deepspeed_partition",
    "nearest_partition",
    "network_aware_partition",
    "partition_by_rank",
    "refine",
    "steady_period_seconds",
]
