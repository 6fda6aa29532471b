"""A job trained in the test's own process, on one rank."""

from collections.abc import Callable, Mapping
from typing import Any

from ballast_policies.contract.messages import ExitReason
from ballast_policies.contract.plan import Plan
from ballast_trainer.channel.base import Channel, StandaloneChannel
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.launch import ValidatedJob, train
from ballast_trainer.loop.rank_launch import RankLaunch
from ballast_trainer.seeding import host_seeded

from tests.support.plans import local_plan


class Told:
    """What rank 0 printed.

    Attributes:
        losses: by step.
        events: all of them, in order.
        reason: of the end.
    """

    def __init__(self, at_step: Callable[[int], None]) -> None:
        self.losses: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.reason: ExitReason | None = None
        self._at_step = at_step

    def step(self, **fields: Any) -> None:
        """A step is done."""
        self.losses[fields["step"]] = fields["loss"]
        self._at_step(fields["step"])

    def event(self, name: str, **fields: Any) -> None:
        """Something happened."""
        self.events.append({"event": name, **fields})

    def evaluations(self) -> dict[int, float]:
        """Validation loss by step."""
        return {e["step"]: e["validation_loss"] for e in self.events if e["event"] == "evaluation"}


def train_here(
    config: Mapping[str, Any],
    *,
    stop_after: int | None = None,
    channel: Channel | None = None,
    plan: Plan | None = None,
) -> Told:
    """Train the whole job, or up to a step after which it is told to stop."""
    stop = StopSignal()

    def at_step(step: int) -> None:
        if step == stop_after:
            stop.received = True

    told, plan = Told(at_step), plan or local_plan(["job-1-0"])
    with host_seeded():
        outcome = train(
            ValidatedJob.from_mapping(config).with_ties(),
            RankLaunch(
                plan=plan,
                process=plan.ranks[0].process,
                channel=channel or StandaloneChannel(plan),
                reporter=told,
                stop=stop,
            ),
        )
    told.reason = outcome.reason
    return told
