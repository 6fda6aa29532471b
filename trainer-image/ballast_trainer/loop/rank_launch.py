"""A process as it is launched among the ranks of a plan."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ballast_policies.contract.plan import Plan

from ballast_trainer.channel.base import Channel
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.environment import DeviceChoice
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.reporting.console import Reporter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A chrome trace of two steps of all ranks, from ``first_step`` (1-based) on, written at the end."""

    path: Path
    first_step: int = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """This process among the ranks of a plan.

    Attributes:
        plan: the ranks.
        process: the name of this one among them (``Rank.process``).
        channel: to the operator; used by rank 0.
        reporter: prints steps and events; used by rank 0.
        stop: whether SIGTERM came.
        lost: called on a separate thread when a rank hangs; must end the process.
        trace: the steps to trace; None: no trace.
        store: where ranks meet; None for one rank that never grows.
        local_rank, local_ranks: this process among those of the pod, or of the machine outside of pods.
        device: what to compute on.
        joining: the plan grows a job that runs already, and this pod is new in it.
        regrouped: told of each plan by which ranks that are left go on after a loss; None: none does without
            the others.
        restarts: how often this process was started before, by a pod that starts killed ranks again and whose
            store outlives them; None: it is no such pod.
        store_of: reaches the store of a plan's first pod, and tells it the launch's configuration; None: the
            ranks meet at this one alone.
    """

    plan: Plan
    process: str
    channel: Channel
    reporter: Reporter
    stop: StopSignal
    lost: Callable[[str], None] | None = None
    trace: TraceRequest | None = None
    store: Any = None
    local_rank: int = 0
    local_ranks: int = 1
    device: DeviceChoice = DeviceChoice.AUTO
    joining: bool = False
    regrouped: Callable[[Plan], None] | None = None
    restarts: int | None = None
    store_of: Callable[[Plan], Any] | None = None

    @property
    def rank(self) -> int:
        """This process's rank. Raises ConfigurationError: the plan does not name the process."""
        rank = self.plan.rank_of(self.process)
        if rank is None:
            raise ConfigurationError("plan.ranks", f"plan {self.plan.epoch} does not name {self.process!r}")
        return rank


def ties_key(plan: Plan) -> str:
    """Key in the store of a launch's tied weights."""
    return f"tied/launch-{plan.launch}"
