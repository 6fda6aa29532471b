"""Straggler mitigation: a tensor group measures its ranks, and prunes or migrates work of late ones.

Each rank measures its own seconds (T) and those of its products (M).  Where one of them finds that its
own have changed by a tenth, all exchange theirs; from the same numbers each then computes the same
decision (:class:`ballast_policies.planning.tensor_parallel.workload.WorkloadTrial`), and no further message
is needed to act on it.
"""

import dataclasses
import functools
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from ballast_policies.contract.job.pipeline import StragglersConfig
from ballast_policies.planning.tensor_parallel.resizing import keep_list, layer_ratio, updated_variation
from ballast_policies.planning.tensor_parallel.semi import (
    LinearCost,
    MoveCosts,
    SemiDecision,
    fit_cost,
    mean_is_stale,
)
from ballast_policies.planning.tensor_parallel.workload import WorkloadTrial

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.gpu_emulation import EmulatedSpeed
from ballast_trainer.layers.layer import Layer
from ballast_trainer.seeding import mixed_key
from ballast_trainer.tensor_parallel.migration import begin_migration, finish_migration, numbers_per_unit
from ballast_trainer.tensor_parallel.parallel_pair import ParallelPair, RowLinear, SlicedLinear, pairs
from ballast_trainer.tensor_parallel.product import ColumnSelection, GemmTimer

logger = logging.getLogger(__name__)

MEASURED_STEPS = 3
"""Steps whose median is a rank's seconds."""

COLUMNS = 1000
"""Columns of a rank's whole work in a decision, which is therefore exact to a thousandth."""


step_clock = time.perf_counter
"""Seconds that pass, by which steps with a decision are compared with those without."""

PATIENCE = 3
"""Epochs after which a column that was left out comes first: the published rule has no such bound."""


class ColumnImportance:
    """Choice of the columns that a straggler leaves out: least changed, or random (section III-B).

    How much each contraction column of one product has changed, and which are kept.

    Attributes:
        variation: delta, mean |change| of each column over the last epoch in which it was computed;
            None before the first epoch is over.
        kept: the columns computed since the last choice; None: all.
        selection: these, as the product computes them in each step.
    """

    def __init__(self, linear: SlicedLinear, config: StragglersConfig, seed: int) -> None:
        self._linear = linear
        self._config = config
        self._random = np.random.default_rng(seed)
        self._columns = linear.matrix.shape[1]
        self._left_out_epochs = np.zeros(self._columns, dtype=np.int64)
        self._before: torch.Tensor | None = None
        self.variation: np.ndarray | None = None
        self.kept: np.ndarray | None = None
        self.selection: ColumnSelection | None = None

    def end_epoch(self) -> None:
        """Measure the change since the last call; columns that were left out keep their last figure."""
        weight = self._linear.matrix.detach()
        if self._before is not None:
            fresh = (weight - self._before).abs().mean(0).cpu().numpy().astype(float)
            kept = np.arange(self._columns) if self.kept is None else self.kept
            old = fresh if self.variation is None else self.variation
            self.variation = updated_variation(old, fresh, kept)
            self._left_out_epochs += 1
            self._left_out_epochs[kept] = 0
        self._before = weight.clone()

    def choose(self, ratio: float, columns: int) -> np.ndarray:
        """Ascending columns to compute, of the first ``columns``, for a rank that leaves out ``ratio``.

        Args:
            ratio: gamma of the rank; varied by layer if so configured.
            columns: those that this rank has not handed over.
        """
        config = self._config
        variation = self._random.random(columns)
        overdue = None
        if config.selection == "priority" and self.variation is not None:
            variation = self.variation[:columns]
            overdue = self._left_out_epochs[:columns]
            if config.differentiated:
                ratio = layer_ratio(variation, ratio, iterations=config.epoch_steps)
        self.kept = keep_list(variation, ratio, pruned_epochs=overdue, patience=PATIENCE)
        return self.kept

    def keep_all(self) -> None:
        """Nothing is left out any more."""
        self.kept = None


_FRACTIONS = (0.25, 0.75)
_REPEATS = 3


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(_REPEATS):
        began = clock()
        work()
        taken.append(clock() - began)
    return statistics.median(taken)


def _resize(pair: ParallelPair, fraction: float) -> None:
    """The copies that a resized pair makes in a forward and a backward."""
    for linear in pair.linears:
        weight = linear.matrix.detach()
        columns = weight.shape[1]
        kept = torch.arange(max(1, round(columns * (1 - fraction))), device=weight.device)
        selection = ColumnSelection(columns=columns, kept=kept)
        value = weight.new_zeros(pair.rows, columns)
        for matrix, name in ((value, "input"), (weight, "weight")):
            selection.select(matrix)
            selection.restore(selection.select(matrix), name)


def _small_products(pair: ParallelPair) -> None:
    """The products of a helper for one column: forward, and both of the backward."""
    for linear in pair.linears:
        # The features that are cut, of which a helper computes few.
        weight = linear.matrix.detach().narrow(int(isinstance(linear, RowLinear)), 0, 1)
        wide = weight.new_zeros(pair.rows, weight.shape[1]) @ weight.t()
        wide @ weight
        wide.t() @ weight.new_zeros(pair.rows, weight.shape[1])


def measure_costs(
    pairs: Sequence[ParallelPair], axis: Axis, columns: int, *, microbatches: int, slowdown: float
) -> MoveCosts:
    """Omega and Phi in seconds a step: pruning and migrating columns on this machine (Algorithm 2, line 1).

    Measured when the group first finds a rank late with the layers that are held; collective over the axis,
    the same on all of its ranks.

    Args:
        pairs: all that are held; the first stands for all.
        axis: the tensor group.
        columns: L, the columns of a rank's whole work.
        microbatches: of a step.
        slowdown: of this rank's device, where one is emulated.
    """
    pair = pairs[0]
    device = pair.device
    times = len(pairs) * microbatches * slowdown
    left_out = [
        times * _seconds(functools.partial(_resize, pair, fraction), pair.clock.now)
        for fraction in _FRACTIONS
    ]
    helping = times * _seconds(functools.partial(_small_products, pair), pair.clock.now)
    numbers = sum(numbers_per_unit(each) * each.units for each in pairs)
    sent = []
    for fraction in _FRACTIONS:
        buffer = torch.zeros(max(1, round(fraction * numbers)), device=device)
        # Weights go out by a broadcast, their gradients return by an all-reduce.
        there = _seconds(functools.partial(axis.broadcast, buffer, 0), time.perf_counter)
        back = _seconds(functools.partial(axis.all_reduce, buffer), time.perf_counter)
        sent.append(there + back)
    rows = axis.gather_values([*left_out, *sent, helping], device)
    slowest = [max(column) for column in zip(*rows, strict=True)]
    at = [fraction * columns for fraction in _FRACTIONS]
    resize, communicate = fit_cost(at, slowest[:2]), fit_cost(at, slowest[2:4])
    return MoveCosts(
        resize_fixed=resize.fixed,
        resize=LinearCost(per_column=resize.per_column),
        communicate=communicate,
        help_fixed=slowest[4],
    )


@dataclasses.dataclass(slots=True)
class _Held:
    """The pairs of one layer, and how important the columns of their maps are."""

    pairs: list[ParallelPair]
    importance: dict[SlicedLinear, ColumnImportance]


class StragglerMitigation:
    """Measures this rank, and applies the decision of its tensor group to its layers.

    Attributes:
        wants_exchange: this rank's seconds are not those that the decision in force was made from.
        changed: the decision was made before the step that runs.
    """

    def __init__(
        self, config: StragglersConfig, device: torch.device, speed: EmulatedSpeed | None, *, seed: int
    ) -> None:
        self._config = config
        self._device = device
        self._slowdown = speed.factor if speed is not None else 1.0
        self._seed = seed
        self._clock = GemmTimer(device, speed)
        self._clock.running = speed is not None or self.active
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=MEASURED_STEPS)
        """T, M and the seconds of the whole step."""
        self._baseline: float | None = None
        self._costs: MoveCosts | None = None
        self._trial = WorkloadTrial(policy=config.policy, tolerance=config.tolerance)
        self._began = 0.0
        self._held: dict[int, _Held] = {}
        self.wants_exchange = False
        self.changed = False

    @property
    def decision(self) -> SemiDecision | None:
        """The decision in force; None before the first exchange."""
        return self._trial.in_force

    @property
    def active(self) -> bool:
        """True if anything is done about late ranks."""
        return self._config.policy != "none"

    def as_json(self) -> dict[str, Any]:
        """The decision in force, as fractions of each rank's work."""
        assert self.decision is not None
        return {
            "late": list(self.decision.stragglers),
            "migrated": [count / COLUMNS for count in self.decision.migrated],
            "left_out": [count / COLUMNS for count in self.decision.pruned],
            "why": self.decision.why,
        }

    def begin_step(
        self, step: int, layers: Iterable[Layer], axis: Axis, *, microbatches: int, exchange: bool
    ) -> None:
        """Begin a step; collective over the tensor axis.

        Args:
            step: 0-based.
            layers: held by this rank.
            axis: the tensor group.
            microbatches: of the step on each replica.
            exchange: some rank of the job wants its group to exchange times.
        """
        self._clock.start_step()
        self.changed = False
        if axis.size == 1 or not self._clock.running:
            return
        held, arrived = self._hold(layers)
        if not self.active or not held:
            # Layers with pairs have moved to other ranks.
            self.wants_exchange = False
            return
        if exchange:
            self._exchange(held, axis, microbatches)
        self._began = step_clock()
        epoch = step % self._config.epoch_steps == 0
        resizes = self._config.policy in {"resize", "semi"}
        if resizes and epoch and self._config.selection == "priority":
            for layer in held:
                for importance in layer.importance.values():
                    importance.end_epoch()
        if self.decision is None:
            return
        fractions = [count / COLUMNS for count in self.decision.migrated]
        begin_migration([layer.pairs for layer in held], fractions, axis, microbatches=microbatches)
        if resizes:
            self._resize(held if epoch or self.changed else arrived, axis)
            for layer in held:
                for linear, importance in layer.importance.items():
                    linear.selection = importance.selection

    def _hold(self, layers: Iterable[Layer]) -> tuple[list[_Held], list[_Held]]:
        """The layers with pairs, and those that have just arrived, which start without history."""
        held, arrived = {}, []
        for layer in layers:
            found = pairs([layer.module])
            known = self._held.get(layer.index)
            if known is None or known.pairs != found:
                known = _Held(found, self._importance(layer.index, found))
                for pair in found:
                    pair.clock = self._clock
                if found:
                    arrived.append(known)
            if found:
                held[layer.index] = known
        if self._held and (arrived or held.keys() != self._held.keys()):
            # Seconds of other layers tell neither whether a rank is late, nor whether a decision has helped,
            # nor what one would cost.
            self._measured.clear()
            self._baseline = self._costs = None
            self._trial.move()
        self._held = held
        return [held[index] for index in sorted(held)], arrived

    def _importance(self, index: int, found: list[ParallelPair]) -> dict[SlicedLinear, ColumnImportance]:
        linears = [linear for pair in found for linear in pair.linears]
        return {
            linear: ColumnImportance(linear, self._config, mixed_key(self._seed, index, number))
            for number, linear in enumerate(linears)
        }

    def _exchange(self, held: list[_Held], axis: Axis, microbatches: int) -> None:
        own = [statistics.median(column) for column in zip(*self._measured, strict=True)] or [0.0] * 3
        rows = axis.gather_values(own, self._device)

        def costs() -> MoveCosts:
            if self._costs is None:
                every = [pair for layer in held for pair in layer.pairs]
                self._costs = measure_costs(
                    every, axis, COLUMNS, microbatches=microbatches, slowdown=self._slowdown
                )
            return self._costs

        if all(row[1] > 0 for row in rows):
            seconds, products, steps = zip(*rows, strict=True)
            before, columns = self.decision, (COLUMNS,) * axis.size
            decision = self._trial.decide(seconds, products, columns, step_seconds=max(steps), costs=costs)
            self.changed = decision != before
            if self.changed and axis.index == 0:
                logger.info("tensor group of rank %d: %s", axis.ranks[0], decision.why)
        self._measured.clear()
        self._baseline, self.wants_exchange = None, False

    def _resize(self, held: list[_Held], axis: Axis) -> None:
        assert self.decision is not None
        migrated, pruned = (
            row[axis.index] / COLUMNS for row in (self.decision.migrated, self.decision.pruned)
        )
        # Columns are pruned from the work that this rank has not handed over.
        ratio = pruned / (1 - migrated)
        for layer in held:
            for pair in layer.pairs:
                for linear in pair.linears:
                    importance = layer.importance[linear]
                    before, importance.selection = importance.selection, None
                    if ratio <= 0:
                        importance.keep_all()
                        continue
                    columns = linear.matrix.shape[1]
                    if isinstance(linear, RowLinear):
                        columns = columns // pair.units * (pair.units - pair.handed_over)
                    kept = importance.choose(ratio, columns)
                    importance.selection = ColumnSelection(
                        columns=columns,
                        kept=torch.from_numpy(kept).to(self._device),
                        imputation=self._config.imputation,
                        last={} if before is None else before.last,
                    )

    def finish_step(self, busy_seconds: float) -> None:
        """Add the gradients that others computed, after a step's backward, and record the step's seconds.

        Args:
            busy_seconds: T of this rank, without waiting for others.
        """
        if not self.active or not self._held:
            return
        finish_migration([layer.pairs for layer in self._held.values()])
        for layer in self._held.values():
            for pair in layer.pairs:
                # An evaluation, a trial or a change between steps sees whole layers.
                pair.compute_whole()
        # On a GPU the seconds of the stage contain the waiting; those of the products do not.
        seconds = busy_seconds + self._clock.extra
        if self._device.type == "cuda":
            seconds = self._clock.seconds
        self._measured.append((seconds, self._clock.seconds, step_clock() - self._began))
        if len(self._measured) < MEASURED_STEPS:
            return
        median = statistics.median(row[0] for row in self._measured)
        if self._baseline is None:
            self._baseline = median
        stale = mean_is_stale(self._baseline, median)
        self.wants_exchange = self.decision is None or stale or self._trial.awaits_seconds
