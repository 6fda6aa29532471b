"""The contract with the operator, as far as a script needs it.

Names and forms are those of ``ballast_policies.contract``, which a user's image need not have;
``tests/client/test_messages.py`` reads what is written here with the contract's own decoder.
"""

import dataclasses
import json
import math
from typing import Any

PLAN_KEY = "plan.json"
REPORT_ANNOTATION = "ballast.dev/report"
PROPOSAL_ANNOTATION = "ballast.dev/proposal"
ACK_ANNOTATION = "ballast.dev/ack"
FINISHED_ANNOTATION = "ballast.dev/finished-step"
END_REASON_ANNOTATION = "ballast.dev/end-reason"
STOP = "checkpointAndStop"
STOPPED_EXIT_CODE = 75
"""Saved and stopped, as asked: the job continues later."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The newest plan: its version, whether it asks to save and stop, and the pods that it names."""

    epoch: int
    stops: bool
    pods: frozenset[str]
    reason: str


def read_plan(text: str) -> Plan:
    """The plan of ``plan.json``. Raises ValueError: it is none."""
    try:
        value = json.loads(text)
        pods = frozenset(str(rank["pod"]) for rank in value["ranks"])
        return Plan(int(value["epoch"]), value["directive"] == STOP, pods, str(value.get("reason", "")))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{PLAN_KEY} is not a plan: {error!r}") from error


def report(
    *, epoch: int, step: int, loss: float | None, rate: float | None, saved: int | None, resumed: int | None
) -> str:
    """Rank 0's figures; steps are counted since the job began, ``rate`` in steps/s."""
    return _json(
        epoch=epoch,
        step=step,
        loss=_number(loss),
        stepsPerSecond=_number(rate),
        checkpointStep=saved,
        resumedFromStep=resumed,
    )


def ack(*, epoch: int, step: int, saved: int | None = None) -> str:
    """All ranks have reached the plan of this epoch."""
    return _json(epoch=epoch, step=step, pauseMs=None, checkpointStep=saved)


def termination(*, message: str, step: int) -> str:
    """Reason that the process ends, for ``kubectl describe pod``."""
    return _json(reason="CheckpointedAndStopped", message=message[:1000], step=step)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _json(**values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
