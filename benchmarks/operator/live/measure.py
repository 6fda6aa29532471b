"""Measures of a live run: completion times, and what starts, stops and ends have cost."""

import dataclasses
import statistics
from collections.abc import Sequence

from live.cluster import LiveRun

AT_ONCE_SECONDS = 2.0
"""A job whose GPUs are granted so soon after its creation found them idle."""
AFTER_RELEASE_SECONDS = 1.0
"""A launch granted within this many seconds after a stopped gang has released its GPUs waited for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Means in seconds, and of how many; ``launch`` and ``stop`` are what the simulator has as settings.

    Attributes:
        launch: from a job's creation to its first step, where the GPUs that it got were idle.
        stop: how much longer it takes from a round's end to the first step where others had to leave.
        launches, changes: starts of the first and of the second kind.
        notice: from a round's end to the last step of a gang that it stops.
        end: from the last step to ``Succeeded``.
    """

    launch: float
    stop: float
    launches: int
    changes: int
    notice: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A gang trained on ``gpu_type`` from ``start`` to ``end`` (s since the trace began)."""

    gpu_type: str
    start: float
    end: float


def completion_seconds(run: LiveRun) -> list[float]:
    """Creation to Succeeded, job by job in the order of the trace."""
    return [job.succeeded - job.submitted for job in run.jobs.values() if job.succeeded is not None]


def makespan_seconds(run: LiveRun) -> float:
    """First creation to last success."""
    jobs = run.jobs.values()
    return max(job.succeeded or 0.0 for job in jobs) - min(job.submitted for job in jobs)


def stretches(run: LiveRun) -> list[list[Stretch]]:
    """Stretches of each job's training, with their place, by what its rank 0 wrote down."""
    found = []
    for events in run.events.values():
        begins = {event["launch"]: event for event in events if event["event"] == "training"}
        ends = {
            event["launch"]: event["time"] for event in events if event["event"] in ("stopped", "finished")
        }
        found.append(
            [
                Stretch(
                    gpu_type=begin["gpuType"], start=begin["time"] - run.began, end=ends[launch] - run.began
                )
                for launch, begin in sorted(begins.items())
            ]
        )
    return found


def launches(run: LiveRun) -> list[int]:
    """Number of launches of each job."""
    return [len(job.granted) for job in run.jobs.values()]


def costs(run: LiveRun, *, round_seconds: float) -> Costs:
    """Costs of starts and ends in ``run``."""
    launch, change, notice, end = [], [], [], []
    freed = [
        job.released[number]
        for name, job in run.jobs.items()
        for number in job.ending
        if number in job.released and "finished" not in _times(run, name, number)
    ]
    for name, job in run.jobs.items():
        for number, granted in job.granted.items():
            at = _times(run, name, number)
            if "training" not in at:
                continue
            if any(0.0 <= granted - moment < AFTER_RELEASE_SECONDS for moment in freed):
                change.append(at["training"] - _round_end_before(run, granted, round_seconds))
            elif number == 1 and granted - job.submitted < AT_ONCE_SECONDS:
                launch.append(at["training"] - job.submitted)
            if "stopped" in at:
                notice.append(at["stopped"] - _round_end_before(run, at["stopped"], round_seconds))
            elif "finished" in at and job.succeeded is not None:
                end.append(job.succeeded - at["finished"])
    return Costs(
        launch=_mean(launch),
        stop=max(0.0, _mean(change) - _mean(launch)) if change and launch else 0.0,
        launches=len(launch),
        changes=len(change),
        notice=_mean(notice),
        end=_mean(end),
    )


def _times(run: LiveRun, job: str, launch: int) -> dict[str, float]:
    """Event -> Unix seconds, of one launch of a job."""
    return {event["event"]: event["time"] for event in run.events[job] if event["launch"] == launch}


def _round_end_before(run: LiveRun, moment: float, round_seconds: float) -> float:
    return moment - (moment - run.began) % round_seconds


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
