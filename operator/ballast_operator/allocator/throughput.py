"""How fast a job would be on each GPU type: known, measured, or guessed. The allocation rests on it.

In this order: what the spec says, scaled by how the job really runs (a model that got cheaper got
cheaper everywhere); what was measured; the mean of what is known; one step a second.  Only ratios
between types matter to max-min fairness, so a job of which nothing is known is simply indifferent.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

NEW_WEIGHT = 0.3
"""Weight of a new report in the moving average (EMA)."""


@dataclasses.dataclass(slots=True)
class Measured:
    """Moving averages of one job: (GPU type, stages) -> steps/s."""

    launch: int = 0
    step: int = -1
    rates: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)


class Measurements:
    """What the trainers have reported, by job."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Measured] = {}

    def take_in(self, view: JobView) -> None:
        """Add the job's newest report, once."""
        held, lease = view.status.held, view.lease
        if held is None or lease is None or lease.report is None or not view.acknowledged:
            return
        report, plan = lease.report, view.launched_plan
        if plan is None or report.epoch != plan.epoch or not report.steps_per_second:
            return
        measured = self._jobs.setdefault(view.key, Measured())
        if (measured.launch, measured.step) == (held.launch, report.step):
            return
        measured.launch, measured.step = held.launch, report.step
        where = (held.gpu_type, len(plan.ranks))
        old = measured.rates.get(where)
        new = report.steps_per_second
        measured.rates[where] = new if old is None else (1 - NEW_WEIGHT) * old + NEW_WEIGHT * new

    def of(self, key: Key) -> Mapping[tuple[str, int], float]:
        """(GPU type, stages) -> steps/s."""
        measured = self._jobs.get(key)
        return {} if measured is None else dict(measured.rates)

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget all other jobs."""
        wanted = set(keys)
        self._jobs = {key: value for key, value in self._jobs.items() if key in wanted}


def estimate(
    spec: JobSpec, measured: Mapping[tuple[str, int], float], gpu_types: Iterable[str], stages: int
) -> dict[str, float]:
    """GPU type -> steps/s of a gang of ``stages``; 0 where the spec says that it cannot run."""
    known = {gpu_type: _at(spec.throughput[gpu_type], stages) for gpu_type in spec.throughput}
    ratios = [
        rate / expected
        for (gpu_type, size), rate in measured.items()
        if gpu_type in spec.throughput and (expected := _at(spec.throughput[gpu_type], size)) > 0
    ]
    scale = ratios[-1] if ratios else 1.0
    unknown = [rate for (gpu_type, _), rate in measured.items() if gpu_type not in known]
    positive = [scale * rate for rate in known.values() if rate > 0] + unknown
    guess = sum(positive) / len(positive) if positive else 1.0
    result = {}
    for gpu_type in gpu_types:
        if gpu_type in known:
            result[gpu_type] = scale * known[gpu_type]
        else:
            result[gpu_type] = measured.get((gpu_type, stages), guess)
    return result


def _at(by_stages: Mapping[int, float], stages: int) -> float:
    """Known steps/s at ``stages``; between and beyond known sizes in proportion to the nearest one."""
    if stages in by_stages:
        return by_stages[stages]
    nearest = min(by_stages, key=lambda known: (abs(known - stages), known))
    return by_stages[nearest] * stages / nearest
