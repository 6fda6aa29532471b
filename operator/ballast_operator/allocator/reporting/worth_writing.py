"""Whether a ClusterPolicy's status has changed by more than the passing of time."""

from typing import Any

from ballast_operator.kube.kinds import Object

SUMS = frozenset({"gpuSeconds", "cost", "heldCost", "dataCost", "monthCost", "nodeHours"})
"""Fields that grow as time passes, at rates that are written."""


def worth_writing(old: Object, new: dict[str, Any]) -> bool:
    """Whether more than the name, time and duration of the last round, and sums of the bill, has changed."""

    def stable(status: Object) -> dict[str, Any]:
        last = status.get("lastRound") or {}
        kept = {k: v for k, v in last.items() if k not in ("planId", "time", "solveSeconds")}
        found = {**status, "lastRound": kept, "billAt": None}
        for part in ("bill", "teams", "hazard"):
            entries = status.get(part) or []
            found[part] = [{k: v for k, v in entry.items() if k not in SUMS} for entry in entries]
        return found

    return stable(old) != stable(new)
