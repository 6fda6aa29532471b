"""Policies for elastic jobs."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ballast_policies.configuration import Configuration
from ballast_policies.elastic.completion_time import CompletionTime
from ballast_policies.elastic.job import ElasticCluster, JobState
from ballast_policies.elastic.sia import Sia


class ElasticPolicy(Protocol):
    """From the jobs in the system and the time (s) to a configuration for each."""

    @property
    def every_round(self) -> bool:
        """Whether it is asked at each round, not only when jobs have arrived or ended."""
        ...

    def __call__(self, jobs: Sequence[JobState], now: float) -> list[Configuration | None]:
        """In the order of ``jobs``; None: the job waits."""
        ...


ELASTIC_POLICIES: Mapping[str, type[CompletionTime] | type[Sia]] = {
    "completion-time": CompletionTime,
    "sia": Sia,
}


def find_elastic_policy(name: str, cluster: ElasticCluster, round_seconds: float) -> ElasticPolicy:
    """The policy of that name.

    Raises:
        KeyError: there is none.
    """
    return ELASTIC_POLICIES[name](cluster=cluster, round_seconds=round_seconds)
