"""What a live run says: completion times, and what starts, stops and ends have cost."""

import dataclasses
import statistics
from collections.abc import Sequence

from live.cluster import LiveRun

AT_ONCE_SECONDS = 2.0
"""A job whose GPUs are granted so soon after its creation found them idle."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Means in seconds, and of how many.

    Attributes:
        launch: from a job's creation to its first step, where the GPUs that it got were idle.
        stop: from a stop written down by the operator to the GPUs free again.
        end: from the last step to ``Succeeded``.
        late: from a round's end on the grid to a stop written down.
    """

    launch: float
    launches: int
    stop: float
    stops: int
    end: float
    late: float


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
    """When each job trained where, by what its rank 0 wrote down."""
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
    """How often each job was launched."""
    return [len(job.granted) for job in run.jobs.values()]


def costs(runs: Sequence[LiveRun], *, round_seconds: float) -> Costs:
    """Means over all of ``runs``."""
    launch, stop, end, late = [], [], [], []
    for run in runs:
        for name, job in run.jobs.items():
            at = {(event["launch"], event["event"]): event["time"] for event in run.events[name]}
            if (1, "training") in at and job.granted[1] - job.submitted < AT_ONCE_SECONDS:
                launch.append(at[1, "training"] - job.submitted)
            for number, told in job.ending.items():
                finished = at.get((number, "finished"))
                if finished is None and number in job.released:
                    stop.append(job.released[number] - told)
                    late.append((told - run.began + round_seconds / 2) % round_seconds - round_seconds / 2)
                elif finished is not None and job.succeeded is not None:
                    end.append(job.succeeded - finished)
    return Costs(
        launch=_mean(launch),
        launches=len(launch),
        stop=_mean(stop),
        stops=len(stop),
        end=_mean(end),
        late=_mean(late),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
