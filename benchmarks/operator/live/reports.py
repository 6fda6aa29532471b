"""Statuses of live jobs over time, and what starts, growths, pauses and ends took by them."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from live_elastic import Watched


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """State of a job's status at a moment (Unix seconds)."""

    at: float
    gpus: int
    joining: bool
    step: int


class Noted(Watched):
    """Also every status of each job, and when it was done."""

    def __init__(self, api: Any) -> None:
        super().__init__(api)
        self.reports: dict[str, list[Report]] = {}
        self.done: dict[str, float] = {}

    def _take_job(self, kind: str, item: dict[str, Any]) -> None:
        now = time.time()
        super()._take_job(kind, item)
        name, status = item["metadata"]["name"], item.get("status") or {}
        for condition in status.get("conditions", []):
            if condition["type"] == "Succeeded" and condition["status"] == "True":
                self.done.setdefault(name, now)
        if held := status.get("allocation"):
            step = (status.get("progress") or {}).get("step") or 0
            found = Report(now, held["gpus"], bool(held.get("joining")), step)
            self.reports.setdefault(name, []).append(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, means of a live run."""

    launch: float
    growth: float
    pause: float
    end: float


def stretches(reports: Sequence[Report]) -> list[list[Report]]:
    """Reports of one size each; one whose new ranks are not there yet is of no size."""
    trained = [report for report in reports if report.step and not report.joining]
    return [list(group) for _, group in itertools.groupby(trained, key=lambda report: report.gpus)]


def costs(
    created: Mapping[str, float],
    jobs: Sequence[tuple[float, int]],
    watched: Noted,
    speeds: Mapping[int, float],
) -> Costs:
    """Seconds of starts, growths and ends.

    A report comes late, by an unknown part of a second: of those of one size the earliest line counts.
    """
    launch, end, growth = [], [], []
    for (name, at), (_, steps) in zip(created.items(), jobs, strict=True):
        parts = stretches(watched.reports.get(name, ()))
        if not parts:  # done before its first report was seen
            continue
        first, last = parts[0], parts[-1]
        launch.append(min(each.at - each.step / speeds[each.gpus] for each in first) - at)
        ended = min(each.at + (steps - each.step) / speeds[each.gpus] for each in last)
        end.append(watched.done[name] - ended)
        began = None
        for report in watched.reports[name]:
            if report.joining:
                began = began or report.at
            elif began is not None:
                growth.append(report.at - began)
                began = None
    pauses = [pause / 1000 for (name, _), pause in watched.pauses.items() if name in created]
    return Costs(
        launch=statistics.fmean(launch),
        growth=statistics.fmean(growth) if growth else 0.0,
        pause=statistics.fmean(pauses) if pauses else 0.1,
        end=max(0.0, statistics.fmean(end)),
    )
