"""Forecast of a configuration on some ranks, from a profile of its layers: step time, bubble and memory.

Predicted by simulating the schedule; no rank is started.  Each rank is taken
to be alone on its device.  A step with a flush ends when the gradients are summed over the replicas of each
stage and the slowest rank's optimizer, which waits for the norm over all ranks, is done:

    T = max over stages s of (max over its replicas r of end(s, r) + exchange_s) + max over ranks of update

    exchange_s = 2 (n - 1) / n weights_s / bandwidth                 n ranks hold stage s

Of t ranks that share each layer the profile has one's part; what they all-reduce is added to each action.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from ballast_policies.contract.errors import camel
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.output import AsyncMode
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.rank_bytes import rank_bytes
from ballast_policies.planning.partition import Partition, even_partition
from ballast_policies.planning.profile import LayerProfile, ProfiledLayer, repeated_layers, routed_both_ways
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.costs import StageCosts, stage_costs
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.planning.schedules.schedule import Kind, Schedule
from ballast_policies.planning.schedules.simulate import BubbleSplit, Span, Trace, simulate, split_bubble
from ballast_policies.planning.schedules.validate import validate
from ballast_policies.planning.step_time import predict_step_seconds

from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.pipeline.layout import ScheduleRequest, is_asynchronous

FLOW_STEPS = 4
"""Simulated steps of a schedule without a flush; a step's time is the mean of as many further steps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The ranks and their links.

    Attributes:
        speeds: of each rank, relative to the device that was profiled; empty: all 1.
        bandwidth: bytes/s between two ranks; None: transfers are free.
        action_seconds: what each forward and each backward takes besides its layers; see
            :class:`ballast_policies.planning.schedules.costs.StageCosts`.
    """

    speeds: tuple[float, ...] = ()
    bandwidth: float | None = None
    action_seconds: float = 0.0

    def pipelines(self, ranks: int, mesh: Mesh) -> tuple[tuple[float, ...], ...]:
        """Speeds by position of each line of the mesh's ranks along the pipeline.

        Raises:
            ConfigurationError: there are speeds of another number of ranks.
        """
        if self.speeds and len(self.speeds) != ranks:
            raise ConfigurationError(
                "--speeds", f"{len(self.speeds)} speeds for {ranks} ranks. To fix: give one for each rank"
            )
        lines = mesh.lines("position", ranks)
        return tuple(tuple(self.speeds[rank] if self.speeds else 1.0 for rank in line) for line in lines)


ALIKE = Machines()
"""Ranks like the device that was profiled, and free transfers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """One rank.

    Attributes:
        layers: first and end layer of each of its stages.
        busy_seconds: of a step.
        in_flight: most microbatches whose activations it holds at once, over its stages.
        weight_versions: most versions of a stage's weights it holds.
        held_bytes: weights, gradients, optimizer state, further versions of the weights.
        activation_bytes: at the fullest moment, besides what is held.
        host_bytes: of the host's memory, for the copy from which a checkpoint is written beside the steps.
    """

    rank: int
    layers: tuple[tuple[int, int], ...]
    busy_seconds: float
    in_flight: int
    weight_versions: int
    held_bytes: float
    activation_bytes: float
    host_bytes: float

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
                {camel(name): value for name, value in dataclasses.asdict(rank).items()}
                | {"bytes": rank.bytes}
                for rank in self.ranks
            ],
        }


def forecasts(
    config: JobConfig,
    rows: Sequence[ProfiledLayer],
    *,
    ranks: int,
    machines: Machines = ALIKE,
    steps: int = FLOW_STEPS,
) -> tuple[Forecast, ...]:
    """The partition that the job starts with (its plan's for as many stages), and the balanced one.

    Args:
        config: the job.
        rows: its layers, seconds of one microbatch.
        ranks: over all replicas of the pipeline.
        machines: the ranks and their links.
        steps: of a schedule without a flush, how many to simulate; twice as many for a step's time.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    pipelines = machines.pipelines(ranks, Mesh.of(config))
    schedule = schedule_for(config, ranks, steps=steps)
    if schedule.stages > len(rows):
        reason = f"{schedule.stages} stages need as many layers; the profile has {len(rows)}. To fix: --ranks"
        raise ConfigurationError("pipeline.maxStages", reason)
    replicas = [float(len(holders)) for holders in schedule.stage_ranks]
    start = even_partition(len(rows), schedule.stages)
    if config.plan is not None and len(config.plan.layers) == schedule.stages:
        start = Partition(bounds=config.plan.bounds)
        if start.layers != len(rows):
            reason = f"has {start.layers} layers, the profile {len(rows)}. To fix: a plan of this model"
            raise ConfigurationError("plan.layers", reason)
    elif max(replicas) > 1:
        start = exact_partition([1.0] * len(rows), schedule.stages, RankCapacity(speeds=replicas))
    microbatches = config.pipeline.microbatches // config.parallelism.data
    # How fast each stage is done with its layers: its replicas together, the slowest pipeline's.
    speeds = [
        min(len(holders) * min(speeds[rank] for rank in holders) for speeds in pipelines)
        for holders in schedule.stage_ranks
    ]
    balanced = exact_partition(
        [row.step_seconds(microbatches) for row in rows], schedule.stages, RankCapacity(speeds=speeds)
    )
    partitions = {"start": start} | ({"balanced": balanced} if balanced != start else {})
    return tuple(
        forecast(config, rows, partition, name=name, ranks=ranks, machines=machines, steps=steps)
        for name, partition in partitions.items()
    )


def schedule_for(config: JobConfig, ranks: int, *, steps: int) -> Schedule:
    """The actions of one step; of ``steps`` steps where there is no flush.

    Raises:
        ConfigurationError: the counts do not suit the schedule, or the ranks do not divide over the mesh.
    """
    request = ScheduleRequest.of(config, Mesh.of(config).positions(ranks))
    if request.ranks == 1:
        # One rank alone goes through its microbatches one by one.
        return dataclasses.replace(request, name="1F1B", replicas=(), stages_per_rank=None).one_step()
    return request.run_of(steps) if request.asynchronous else request.one_step()


def forecast(
    config: JobConfig,
    rows: Sequence[ProfiledLayer],
    partition: Partition,
    *,
    ranks: int,
    name: str = "given",
    machines: Machines = ALIKE,
    steps: int = FLOW_STEPS,
) -> Forecast:
    """One partition of the layers over the stages of the job's schedule; arguments as of :func:`forecasts`.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
        ScheduleError: the partition has another number of stages.
    """
    data = config.parallelism.data
    pipelines = machines.pipelines(ranks, Mesh.of(config))
    schedule = schedule_for(config, ranks, steps=steps)
    costs = [_costs(partition, rows, machines, speeds, config) for speeds in pipelines]
    if schedule.split_backwards():
        costs = [_in_halves(of, _repeated_part(partition, rows, config)) for of in costs]
    traces = [simulate(schedule, of) for of in costs]
    slowest = max(range(len(traces)), key=lambda at: traces[at].makespan)
    played = 1
    if is_asynchronous(config.pipeline.schedule) and schedule.ranks > 1:
        longer = schedule_for(config, ranks, steps=2 * steps)
        step_seconds = max(
            (simulate(longer, of).makespan - trace.makespan) / steps
            for of, trace in zip(costs, traces, strict=True)
        )
        played = steps
    else:
        step_seconds = _with_flush(partition, rows, schedule, traces, machines, data)
    trace = traces[slowest]
    busy = [seconds / played for seconds in trace.busy]
    formula = None
    if SCHEDULES[config.pipeline.schedule].closed_form and not config.pipeline.used_replicas:
        updates = _update_seconds(trace)
        formula = predict_step_seconds(
            [load - update for load, update in zip(busy, updates, strict=True)],
            schedule.microbatches,
            boundary_seconds=costs[slowest].transfer,
            fixed_seconds=max(updates),
        )
    return Forecast(
        name=name,
        schedule=schedule.name,
        ranks=_rank_forecasts(partition, schedule, rows, busy, config),
        step_seconds=step_seconds,
        formula_seconds=formula,
        imbalance=max(busy) / (math.fsum(busy) / len(busy)) - 1 if any(busy) else 0.0,
        bubble=split_bubble(schedule, costs[slowest]),
        trace=trace,
    )


def _with_flush(
    partition: Partition,
    rows: Sequence[ProfiledLayer],
    schedule: Schedule,
    traces: Sequence[Trace],
    machines: Machines,
    data: int,
) -> float:
    """Seconds of a step of replicas of one pipeline."""
    ends = [
        max((span.end for trace in traces for span in trace.spans if _computes(span, rank)), default=0.0)
        for rank in range(schedule.ranks)
    ]
    done = []
    for holders, layers in zip(schedule.stage_ranks, itertools.pairwise(partition.bounds), strict=True):
        holding = len(holders) * data
        exchange = 0.0
        if machines.bandwidth is not None:
            weights = sum(rows[layer].weight_bytes - rows[layer].expert_bytes for layer in range(*layers))
            exchange = 2 * (holding - 1) / holding * weights / machines.bandwidth
        done.append(max(ends[rank] for rank in holders) + exchange)
    return max(done) + max(max(_update_seconds(trace)) for trace in traces)


def _computes(span: Span, rank: int) -> bool:
    return span.rank == rank and span.action.kind is not Kind.UPDATE


def _update_seconds(trace: Trace) -> list[float]:
    """Seconds of the optimizer by rank, in a trace with a flush."""
    found = [0.0] * trace.schedule.ranks
    for span in trace.spans:
        if span.action.kind is Kind.UPDATE:
            found[span.rank] += span.end - span.start
    return found


def _costs(
    partition: Partition,
    rows: Sequence[ProfiledLayer],
    machines: Machines,
    speeds: Sequence[float],
    config: JobConfig,
) -> StageCosts:
    """Seconds of the stages, with what replicas that share weights gather and tensor groups all-reduce.

    Of ZeRO-3, a stage's forward and its backward follow each other: the layer that one ends with is whole
    when the other begins. A backward that repeats its forward all-reduces for both.
    """
    parallelism, repeats = config.parallelism, repeated_layers(len(rows), config.training.repeated)
    bandwidth, tensor, shares = machines.bandwidth, parallelism.tensor, parallelism.weight_shares
    between = tensor if parallelism.scatter_gather else 1
    costs = stage_costs(
        partition,
        forward_seconds=[row.forward_seconds for row in rows],
        backward_seconds=[row.backward_seconds for row in rows],
        microbatches=1,
        update_seconds=[row.optimizer_seconds for row in rows],
        boundary_seconds=()
        if bandwidth is None
        else [row.output_bytes / between / bandwidth for row in rows[:-1]],
        speeds=speeds,
    )
    gathered = (0.0,) * costs.stages, (0.0,) * costs.stages
    if bandwidth is not None:
        stages = [rows[a:b] for a, b in itertools.pairwise(partition.bounds)]
        each, reduced = (shares - 1) / shares / bandwidth, (tensor - 1) / tensor / bandwidth
        exchanged = reduced * np.array([row.exchanged_bytes for row in rows])
        routed = routed_both_ways([row.routed_bytes for row in rows], repeats)
        away = (1 - 1 / parallelism.data) / bandwidth
        each_way = exchanged + away * routed[0], (1 + repeats) * exchanged + away * routed[1]
        once, again = (np.add.reduceat(of, partition.bounds[:-1]).tolist() for of in each_way)
        weights = [[each * row.weight_bytes for row in of] for of in stages]
        gathered = (
            tuple(sum(of[1:]) + more for of, more in zip(weights, once, strict=True)),
            tuple(sum(of[:-1]) + more for of, more in zip(weights, again, strict=True)),
        )
    forward, backward = (
        tuple(map(operator.add, own, more))
        for own, more in zip((costs.forward, costs.backward), gathered, strict=True)
    )
    return dataclasses.replace(
        costs, forward=forward, backward=backward, action_seconds=machines.action_seconds
    )


def _repeated_part(partition: Partition, rows: Sequence[ProfiledLayer], config: JobConfig) -> np.ndarray:
    """Part of each stage's forward that is repeated for the backward."""
    forward = np.array([row.forward_seconds for row in rows])
    repeated = repeated_layers(len(rows), config.training.repeated) * forward
    of_stages, found = (np.add.reduceat(of, partition.bounds[:-1]) for of in (forward, repeated))
    return np.divide(found, of_stages, out=np.zeros_like(found), where=of_stages > 0)


def _in_halves(costs: StageCosts, repeated: np.ndarray) -> StageCosts:
    """Costs where backwards are split, as torch's pipelining does it; ``repeated``: part of each forward.

    The first stage, whose input no stage waits for, does all of it in the weights' half. Where forwards are
    repeated for the backward, the inputs' half repeats them.
    """
    again = (repeated * costs.forward).tolist()
    halves = [(whole + more) / 2 for whole, more in zip(costs.backward[1:], again[1:], strict=True)]
    return dataclasses.replace(costs, backward_input=(0.0, *halves))


def _rank_forecasts(
    partition: Partition,
    schedule: Schedule,
    rows: Sequence[ProfiledLayer],
    busy: Sequence[float],
    config: JobConfig,
) -> tuple[RankForecast, ...]:
    facts, cuts = validate(schedule), list(itertools.pairwise(partition.bounds))
    parallelism, saved = config.parallelism, config.checkpoint
    is_copied = saved.path is not None and saved.async_mode is AsyncMode.ASYNC
    # Replicas write a share each of all but the gradients: as large as the weights, or none.
    gradients = [min(row.weight_bytes, max(0.0, row.held_bytes - row.weight_bytes)) for row in rows]
    held = [row.held_bytes - of for row, of in zip(rows, gradients, strict=True)]
    copied = [is_copied * each / parallelism.data for each in held]
    sizes = rank_bytes(
        partition,
        schedule,
        facts,
        LayerProfile.of(rows).sums,
        PipelineForm.of(config, schedule.ranks),
    )
    stages = [
        [stage for stage, holders in enumerate(schedule.stage_ranks) if rank in holders]
        for rank in range(len(sizes))
    ]
    return tuple(
        RankForecast(
            rank=rank,
            layers=tuple(cuts[stage] for stage in own),
            busy_seconds=busy[rank],
            in_flight=facts.in_flight[rank],
            weight_versions=max(facts.versions_held[stage] for stage in own),
            held_bytes=size.held,
            activation_bytes=size.step,
            host_bytes=sum(sum(copied[slice(*cuts[stage])]) for stage in own),
        )
        for rank, (size, own) in enumerate(zip(sizes, stages, strict=True))
    )
