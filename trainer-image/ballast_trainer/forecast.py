"""Forecast of a configuration on a number of ranks: step time, bubble and memory.

Predicted from a profile of the layers by simulating the schedule; no rank is started.  Each rank is taken
to compute as fast as the device that was profiled, and to be alone on it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.contract.job import JobConfig
from ballast_policies.planning import (
    Partition,
    RankCapacity,
    even_partition,
    exact_partition,
    predict_step_seconds,
)
from ballast_policies.planning.profile_file import ProfiledLayer
from ballast_policies.planning.schedules import (
    SCHEDULES,
    BubbleSplit,
    Kind,
    Schedule,
    StageCosts,
    Trace,
    simulate,
    split_bubble,
    stage_costs,
    validate,
)

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.pipeline.layout import (
    ScheduleRequest,
    is_asynchronous,
    used_replicas,
)

FLOW_STEPS = 4
"""Simulated steps of a schedule without a flush; a step's time is the mean of as many further steps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """One rank.

    Attributes:
        layers: first and end layer of each of its stages.
        busy_seconds: of a step.
        in_flight: most microbatches whose activations it holds at once, over its stages.
        weight_versions: most versions of a stage's weights it holds.
        held_bytes: weights, gradients, optimizer state, further versions of the weights.
        activation_bytes: at the fullest moment.
    """

    rank: int
    layers: tuple[tuple[int, int], ...]
    busy_seconds: float
    in_flight: int
    weight_versions: int
    held_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        """Everything at the fullest moment."""
        return self.held_bytes + self.activation_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One partition of a configuration.

    Attributes:
        name: ``start`` (before anything is measured) or ``balanced`` (after a rebalance).
        step_seconds: simulated; the optimizer included.
        formula_seconds: AMP's closed form (see ``planning.step_time``), where it applies.
        bubble: idle fraction, split into the schedule's own and imbalance.
        trace: the simulated actions; of one step, or of several where there is no flush.
    """

    name: str
    schedule: str
    ranks: tuple[RankForecast, ...]
    step_seconds: float
    formula_seconds: float | None
    imbalance: float
    bubble: BubbleSplit
    trace: Trace

    def as_json(self) -> dict[str, Any]:
        """The figures, with the keys of the command's JSON."""
        return {
            "partition": self.name,
            "schedule": self.schedule,
            "stepSeconds": self.step_seconds,
            "formulaSeconds": self.formula_seconds,
            "imbalance": self.imbalance,
            "bubble": dataclasses.asdict(self.bubble),
            "ranks": [
                {
                    "rank": rank.rank,
                    "layers": [list(layers) for layers in rank.layers],
                    "busySeconds": rank.busy_seconds,
                    "inFlight": rank.in_flight,
                    "weightVersions": rank.weight_versions,
                    "heldBytes": rank.held_bytes,
                    "activationBytes": rank.activation_bytes,
                    "bytes": rank.bytes,
                }
                for rank in self.ranks
            ],
        }


def positions_of(config: JobConfig, ranks: int) -> int:
    """How many of the ranks are in one pipeline.

    Raises:
        ConfigurationError: the layers are to be shared by several ranks, or the ranks do not divide.
    """
    parallelism = config.parallelism
    if parallelism.tensor > 1:
        raise ConfigurationError(
            "parallelism.tensor",
            f"{parallelism.tensor}: a profile has the seconds of whole layers. "
            "To fix: --set parallelism.tensor=1",
        )
    if ranks % parallelism.data:
        raise ConfigurationError(
            "parallelism.data", f"{ranks} ranks are no multiple of {parallelism.data} replicas"
        )
    return ranks // parallelism.data


def forecasts(
    config: JobConfig,
    rows: Sequence[ProfiledLayer],
    *,
    ranks: int,
    bandwidth: float | None = None,
    steps: int = FLOW_STEPS,
) -> tuple[Forecast, ...]:
    """The partition that the job starts with, and the balanced one if that is another.

    Args:
        config: the job.
        rows: its layers, seconds of one microbatch.
        ranks: over all replicas of the pipeline, whose exchange of gradients is not counted.
        bandwidth: bytes/s between two ranks; None: transfers are free.
        steps: of a schedule without a flush, how many to simulate; twice as many for a step's time.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    schedule = schedule_for(config, ranks, steps=steps)
    if schedule.stages > len(rows):
        reason = f"{schedule.stages} stages need as many layers; the profile has {len(rows)}. To fix: --ranks"
        raise ConfigurationError("pipeline.maxStages", reason)
    replicas = [float(len(holders)) for holders in schedule.stage_ranks]
    uneven = max(replicas) > 1
    start = even_partition(len(rows), schedule.stages)
    if uneven:
        start = exact_partition([1.0] * len(rows), schedule.stages, RankCapacity(speeds=replicas))
    microbatches = config.pipeline.microbatches // config.parallelism.data
    balanced = exact_partition(
        [row.step_seconds(microbatches) for row in rows],
        schedule.stages,
        RankCapacity(speeds=replicas if uneven else None),
    )
    partitions = {"start": start} | ({"balanced": balanced} if balanced != start else {})
    return tuple(
        _forecast(name, partition, schedule, config, rows, ranks, bandwidth, steps)
        for name, partition in partitions.items()
    )


def schedule_for(config: JobConfig, ranks: int, *, steps: int) -> Schedule:
    """The actions of one step; of ``steps`` steps where there is no flush.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    request = ScheduleRequest.of(config, positions_of(config, ranks))
    if request.ranks == 1:
        return dataclasses.replace(request, name="GPipe", replicas=(), stages_per_rank=None).one_step()
    return request.run_of(steps) if request.asynchronous else request.one_step()


def _forecast(
    name: str,
    partition: Partition,
    schedule: Schedule,
    config: JobConfig,
    rows: Sequence[ProfiledLayer],
    ranks: int,
    bandwidth: float | None,
    steps: int,
) -> Forecast:
    costs = _costs(partition, rows, bandwidth)
    trace = simulate(schedule, costs)
    step_seconds, played = trace.makespan, 1
    if is_asynchronous(config.pipeline.schedule) and schedule.ranks > 1:
        longer = simulate(schedule_for(config, ranks, steps=2 * steps), costs)
        step_seconds, played = (longer.makespan - trace.makespan) / steps, steps
    busy = [seconds / played for seconds in trace.busy]
    formula = None
    if SCHEDULES[config.pipeline.schedule].closed_form and not used_replicas(config.pipeline.replicas):
        updates = [sum(rows[i].optimizer_seconds for i in range(*layers)) for layers in _cuts(partition)]
        formula = predict_step_seconds(
            [load - update for load, update in zip(busy, updates, strict=True)],
            schedule.microbatches,
            boundary_seconds=costs.transfer,
            fixed_seconds=max(updates),
        )
    return Forecast(
        name=name,
        schedule=schedule.name,
        ranks=_ranks(partition, schedule, rows, busy),
        step_seconds=step_seconds,
        formula_seconds=formula,
        imbalance=max(busy) / (math.fsum(busy) / len(busy)) - 1 if any(busy) else 0.0,
        bubble=split_bubble(schedule, costs),
        trace=trace,
    )


def _costs(partition: Partition, rows: Sequence[ProfiledLayer], bandwidth: float | None) -> StageCosts:
    return stage_costs(
        partition,
        forward_seconds=[row.forward_seconds for row in rows],
        backward_seconds=[row.backward_seconds for row in rows],
        microbatches=1,
        update_seconds=[row.optimizer_seconds for row in rows],
        boundary_seconds=() if bandwidth is None else [row.output_bytes / bandwidth for row in rows[:-1]],
        serial_links=bandwidth is not None,
    )


def _cuts(partition: Partition) -> list[tuple[int, int]]:
    return [
        (partition.bounds[stage], partition.bounds[stage + 1]) for stage in range(len(partition.bounds) - 1)
    ]


def _ranks(
    partition: Partition, schedule: Schedule, rows: Sequence[ProfiledLayer], busy: Sequence[float]
) -> tuple[RankForecast, ...]:
    facts, cuts = validate(schedule), _cuts(partition)
    found = []
    for rank in range(schedule.ranks):
        own = [stage for stage, holders in enumerate(schedule.stage_ranks) if rank in holders]
        held = 0.0
        for stage in own:
            layers = [rows[i] for i in range(*cuts[stage])]
            held += sum(row.held_bytes for row in layers)
            held += (facts.versions_held[stage] - 1) * sum(row.weight_bytes for row in layers)
        kept = {stage: sum(rows[i].activation_bytes for i in range(*cuts[stage])) for stage in own}
        found.append(
            RankForecast(
                rank=rank,
                layers=tuple(cuts[stage] for stage in own),
                busy_seconds=busy[rank],
                in_flight=facts.in_flight[rank],
                weight_versions=max(facts.versions_held[stage] for stage in own),
                held_bytes=held,
                activation_bytes=_fullest(schedule, rank, kept),
            )
        )
    return tuple(found)


def _fullest(schedule: Schedule, rank: int, kept: Mapping[int, float]) -> float:
    """Most activation bytes at once: from a forward to its backward, or to the weight half of it."""
    now = most = 0.0
    for action in schedule.actions[rank]:
        if action.kind is Kind.FORWARD:
            now += kept[action.stage]
            most = max(most, now)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            now -= kept[action.stage]
    return most
