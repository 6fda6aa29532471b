"""The channel of a run without an operator: every repack is granted at once, inside the process."""

from collections.abc import Callable, Mapping
from typing import Any

from ballast_policies.contract import Plan

from ballast_trainer.channel.base import Messages


class StandaloneChannel:
    """Grants every proposal of the current epoch; see :class:`~ballast_trainer.channel.base.Channel`."""

    def __init__(self, plan: Plan, growth: Callable[[Plan], Plan] = lambda plan: plan) -> None:
        """``growth`` of the plan in force returns the one by which ranks that are back join, or it itself."""
        self._plan, self._growth = plan, growth
        self._newest = plan

    def read_plan(self) -> Plan | None:
        """The launch's plan, the last granted one, or one that grows it."""
        self._newest = self._growth(self._plan)
        return self._newest

    def read_config(self) -> Mapping[str, Any] | None:
        """None: the configuration comes from the command line."""
        return None

    def follow(self, plan: Plan) -> None:
        """Ranks were lost: those that are left go on by this one."""
        self._plan = self._newest = plan

    def close(self) -> None:
        """Nothing runs."""

    def write(self, messages: Messages) -> None:
        """Answer a proposal with the plan it asks for."""
        if messages.ack is not None and messages.ack.epoch == self._newest.epoch:
            self._plan = self._newest
        proposal = messages.proposal
        if proposal is not None and proposal.epoch == self._plan.epoch:
            self._plan = self._plan.shrink(proposal)
