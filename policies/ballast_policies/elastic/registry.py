"""Policies for elastic jobs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from ballast_policies.configuration import Configuration
from ballast_policies.elastic.completion_time import CompletionTime
from ballast_policies.elastic.job import ElasticCluster, JobState
from ballast_policies.registry import Registry


class ElasticPolicy(Protocol):
    """From the jobs in the system and the time (s) to a configuration for each."""

    @property
    def every_round(self) -> bool:
        """Whether it is asked at each round, not only when jobs have arrived or ended."""
        ...

    def __call__(self, jobs: Sequence[JobState], now: float) -> list[Configuration | None]:
        """In the order of ``jobs``; None: the job waits."""
        ...


@dataclasses.dataclass(frozen=True)
class ElasticPolicyKind:
    """A row.

    Attributes:
        build: the policy for a cluster and the seconds of a round.
    """

    summary: str
    build: Callable[[ElasticCluster, float], ElasticPolicy]


ELASTIC_POLICIES: Registry[ElasticPolicyKind] = Registry(
    "elastic policy",
    group="ballast.elastic_policies",
    row_type=ElasticPolicyKind,
    rows={
        "completion-time": ElasticPolicyKind(
            summary="the shortest average completion time of jobs whose lengths are known",
            build=lambda cluster, seconds: CompletionTime(cluster=cluster, round_seconds=seconds),
        ),
    },
)
