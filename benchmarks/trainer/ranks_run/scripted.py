"""A reporter that keeps what it is told, and a channel that publishes plans by the step."""

import itertools
import threading
from typing import Any

from ballast_policies.contract.messages import Stage
from ballast_policies.contract.plan import Directive, Plan
from ballast_trainer.channel.base import Messages


class Lines:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def step(self, **fields: Any) -> None:
        """A step is done."""
        self.lines.append(fields)

    def event(self, name: str, **fields: Any) -> None:
        """Something happened."""
        self.lines.append({"event": name, **fields})


class ScriptedChannel:
    """Publishes the job's plans one after the other, each once its step is reported."""

    def __init__(self, plan: Plan, replans: Any) -> None:
        self._lock = threading.Lock()
        self._plan = plan
        self._replans = list(replans)

    def read_plan(self) -> Plan:
        """The plan in force."""
        with self._lock:
            return self._plan

    def read_config(self) -> None:
        """The job has it."""
        return None

    def write(self, messages: Messages) -> None:
        """Switch to the next plan where its step is done."""
        report = messages.report
        with self._lock:
            if report is None or not self._replans or report.step < self._replans[0][0]:
                return
            _, ranks, bounds = self._replans.pop(0)
            shrinks = ranks < len(self._plan.ranks)
            self._plan = self._plan.replace(
                epoch=self._plan.epoch + 1,
                directive=Directive.SHRINK if shrinks else Directive.RUN,
                ranks=self._plan.ranks[:ranks],
                stages=stages(bounds, range(ranks)),
            )


def stages(bounds: Any, placement: Any) -> tuple[Stage, ...]:
    """Stages with these bounds, each on its rank."""
    return tuple(
        Stage(rank=rank, first_layer=first, end_layer=end)
        for rank, (first, end) in zip(placement, itertools.pairwise(bounds), strict=True)
    )
