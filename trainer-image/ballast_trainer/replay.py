"""Replay of a run's load curve: what following it wins over any cut that stays.

A run prints by each look the seconds that every layer takes and what its decision reads of them (event
``loads``), in ``--log json`` and in ``metrics.jsonLines``.  From these the decisions are made again, for any
number of ranks and any settings, without running anything; each look stands for the steps until the next.
Lines of older versions have the seconds alone: what is expected of the layers is then what they took, and
the noise of the measurements is not known.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import camel
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.registry import BalancerInput
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rebalance import decide_rebalance, least_gain
from ballast_policies.planning.step_time import predict_step_seconds

from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.pipeline.layout import steps_between_drains

EVENT = "loads"


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The layers as measured after a step.

    Attributes:
        step: steps done.
        seconds: of each layer, a step, shape (L,).
        coming: what each layer was expected to take, shape (L,).
        measured: the steps that this follows from, shape (n, L).
        move_seconds: what a move cost by then; None before the first.
    """

    step: int
    seconds: tuple[float, ...]
    coming: tuple[float, ...]
    measured: tuple[tuple[float, ...], ...] = ()
    move_seconds: float | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Look":
        """Look from a line's fields. Raises ValueError, KeyError, TypeError: they are no look."""
        seconds = _load(row["seconds"], row["step"])
        coming = _load(row.get("coming", seconds), row["step"])
        measured = tuple(_load(step, row["step"]) for step in row.get("measured", ()))
        if {len(coming), *map(len, measured)} != {len(seconds)}:
            raise ValueError(f"step {row['step']} has loads of different numbers of layers")
        cost = row.get("move_seconds")
        return cls(int(row["step"]), seconds, coming, measured, None if cost is None else float(cost))


def _load(values: Any, step: Any) -> tuple[float, ...]:
    seconds = tuple(float(value) for value in values)
    if not seconds or min(seconds) < 0 or sum(seconds) <= 0:
        raise ValueError(f"seconds {list(seconds)[:4]} ... of step {step} are not a load")
    return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run's load curve under four ways to cut it.

    Attributes:
        looks: how many there are.
        moves: steps after which layers moved.
        first_seconds: mean step of the best cut for the first look, if it stays.
        static_seconds: mean step of the cut that is best for the mean of all looks.
        followed_seconds: of the cuts that the balancer chose, one look late, as in a run.
        best_seconds: of the best cut for each look.
    """

    looks: int
    moves: tuple[int, ...]
    first_seconds: float
    static_seconds: float
    followed_seconds: float
    best_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Fields with JSON's names."""
        return {camel(name): value for name, value in dataclasses.asdict(self).items()}


def read_loads(path: Path) -> tuple[Look, ...]:
    """The looks in what a run printed, each step's last one: a run that began again looks at it again.

    Raises:
        ConfigurationError: the file cannot be read, has no looks, or they are not of the same layers.
    """
    looks = []
    try:
        for line in path.read_text().splitlines():
            row = parse_json(line) if line.startswith("{") and f'"{EVENT}"' in line else None
            if isinstance(row, dict) and row.get("event") == EVENT:
                looks.append(Look.of(row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError("--loads", f"{path} cannot be read: {error}. {_FIX}") from error
    if not looks:
        raise ConfigurationError("--loads", f"{path} has no event {EVENT!r}. {_FIX}")
    if len({len(look.seconds) for look in looks}) > 1:
        raise ConfigurationError("--loads", f"{path} has looks at different numbers of layers. {_FIX}")
    return tuple(sorted({look.step: look for look in looks}.values(), key=lambda look: look.step))


_FIX = "To fix: give what 'ballast-train run --log json' printed, with rebalance.enabled"


def replay(config: JobConfig, looks: Sequence[Look], *, ranks: int) -> Replay:
    """Cut the layers over the pipeline of ``ranks``, a stage a position, by four rules.

    ``looks`` are of one run, by step.

    Raises:
        ConfigurationError: more positions than layers, or what is balanced is not seconds.
        PlanningError: the balancer needs what a load curve has not, e.g. links.
    """
    layers, stages = len(looks[0].seconds), Mesh.of(config).positions(ranks)
    if stages > layers:
        raise ConfigurationError("--ranks", f"{stages} stages for {layers} layers. To fix: fewer ranks")
    settings = config.rebalance
    if settings.by != "time":
        raise ConfigurationError(
            "rebalance.by",
            f"{str(settings.by)!r}: a load curve has seconds alone. To fix: --set rebalance.by=time",
        )
    microbatches = config.pipeline.microbatches // config.parallelism.data * steps_between_drains(config)

    def step_seconds(cut: Partition, look: Look) -> float:
        return predict_step_seconds(cut.loads(look.seconds), microbatches)

    ends = [look.step for look in looks[1:]]
    spans = [end - look.step for end, look in zip(ends, looks, strict=False)]
    # The last look stands for as many steps as the one before it.
    spans.append(spans[-1] if spans else 1)
    mean = [
        sum(span * look.seconds[layer] for span, look in zip(spans, looks, strict=True)) / sum(spans)
        for layer in range(layers)
    ]
    static, following = exact_partition(mean, stages), exact_partition(looks[0].seconds, stages)
    first = following
    totals, moves = [0.0] * 4, []
    for number, (span, look) in enumerate(zip(spans, looks, strict=True)):
        best = exact_partition(look.seconds, stages)
        for place, cut in enumerate((first, static, following, best)):
            totals[place] += span * step_seconds(cut, look)
        decision = decide_rebalance(
            BalancerInput(partition=following, seconds=look.coming, microbatches=microbatches),
            min_gain=least_gain(settings.min_gain, look.measured, following),
            horizon_steps=max(1, sum(spans[number:])),
            move_seconds=look.move_seconds,
            method=settings.balancer,
        )
        if decision.rebalance:
            following = decision.partition
            moves.append(look.step)
    means = [total / sum(spans) for total in totals]
    return Replay(
        looks=len(looks),
        moves=tuple(moves),
        first_seconds=means[0],
        static_seconds=means[1],
        followed_seconds=means[2],
        best_seconds=means[3],
    )
