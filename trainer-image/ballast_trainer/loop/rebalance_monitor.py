"""Rank 0's view of whether the partition is worth a look, and whether the last move kept its promise."""

import dataclasses
import functools
import statistics

from ballast_policies.contract.messages import Stage
from ballast_policies.planning.following.looking import CheckTimer, lost_seconds, measured_worse
from ballast_policies.planning.launch import partition_of
from ballast_policies.planning.partition import PlanningError

from ballast_trainer.loop.progress import Progress
from ballast_trainer.loop.replanning import balancer_input, least_gain_now
from ballast_trainer.profiling.profile import LayerCosts

_FEWEST_MEASURED = 3
"""Steps measured before their median is compared."""
_STEPS_AFTER = 5
"""Steps after a move whose seconds are compared with those before."""
_PLAYED = 4
"""Predictions that are kept: those of the stages in force and of those before."""
CHANGED = 0.25
"""Relative change of a layer's seconds from which a cut that was reverted may be tried again."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Moved:
    """A move not measured yet: the stages before it and after, and measured over predicted seconds before."""

    stages: tuple[Stage, ...]
    to: tuple[Stage, ...]
    ratios: tuple[float, ...]


class RebalanceMonitor:
    """Times at which rank 0 looks at the partition, told to the others with the next step's sum."""

    def __init__(self, progress: Progress) -> None:
        self._model, self._progress = progress.model, progress
        self._waiting = CheckTimer()
        self._moved: _Moved | None = None
        self._reverted: dict[tuple[Stage, ...], tuple[float, ...]] = {}
        # Costs change with a measured step alone, and playing a schedule takes milliseconds.
        self._lost = functools.lru_cache(1)(self._lost_seconds)
        self._predicted = functools.lru_cache(_PLAYED)(self._step_seconds)

    def step_done(self) -> None:
        """A step is done under the partition in force."""
        model = self._model
        if model.config.rebalance.every_steps is not None or model.world.rank != 0:
            return
        costs = model.profile.expected(coming=True)
        if costs is not None:
            measured = len(model.profile) >= _FEWEST_MEASURED
            lost = self._lost(model.stages, costs) if measured else 0.0
            self._waiting = self._waiting.after_step(self.stretch() * lost)

    def due(self) -> bool:
        """True if rank 0 wants a check, or to revert the last move."""
        model = self._model
        if model.world.rank != 0 or not model.config.rebalance.enabled:
            return False
        return self.reverts_to() is not None or self._waiting.is_over(self._cost())

    def checked(self, *, moved_from: tuple[Stage, ...] | None, measured: tuple[float, ...] = ()) -> None:
        """The partition was looked at; ``measured``: seconds of the last steps under ``moved_from``."""
        self._waiting = self._waiting.after_look(moved=moved_from is not None)
        costs = self._costs()
        if moved_from is None or costs is None:
            return
        usual = self._predicted(moved_from, costs)
        self._moved = None
        if usual > 0:
            ratios = tuple(second / usual for second in measured)
            self._moved = _Moved(moved_from, self._model.stages, ratios)

    def stretch(self) -> float:
        """Measured over predicted seconds of a step; at least 1.

        Layers are measured in CPU seconds there, moves in seconds that pass: on a machine that is shared a
        step takes several times its CPU seconds, and so does what uneven ranks lose.
        """
        measured, costs = self._progress.step_seconds(), self._costs()
        if not measured or costs is None:
            return 1.0
        predicted = self._predicted(self._model.stages, costs)
        return max(1.0, statistics.median(measured) / predicted) if predicted > 0 else 1.0

    def reverts_to(self) -> tuple[Stage, ...] | None:
        """The stages of before the last move, once it has measured worse; None: it stays."""
        moved, costs = self._moved, self._model.profile.expected()
        after = self._progress.step_seconds()[1:]
        if moved is None or costs is None or len(after) < _STEPS_AFTER:
            return None
        if len(self._model.profile) < _FEWEST_MEASURED or moved.to != self._model.stages:
            return None
        worse = measured_worse(
            moved.ratios,
            after,
            predicted=self._predicted(moved.stages, costs),
            min_gain=self._model.config.rebalance.min_gain,
        )
        if not worse:
            self._moved = None
        return moved.stages if worse else None

    def reverted(self, stages: tuple[Stage, ...]) -> None:
        """A move to ``stages`` was taken back: they wait until the layers' costs have changed."""
        costs = self._model.profile.expected()
        self._moved = None
        if costs is not None:
            self._reverted[stages] = costs.total

    def was_worse(self, stages: tuple[Stage, ...]) -> bool:
        """True if these stages measured worse than predicted, of layers that cost what they cost now."""
        then, now = self._reverted.get(stages), self._model.profile.expected()
        if then is None or now is None:
            return False
        alike = [abs(a - b) <= CHANGED * max(a, b) for a, b in zip(then, now.total, strict=True)]
        return all(alike)

    def _lost_seconds(self, stages: tuple[Stage, ...], costs: LayerCosts) -> float:
        """Seconds that a step of the stages in force loses."""
        asked = balancer_input(self._model, costs, stages)
        try:
            return lost_seconds(asked, min_gain=least_gain_now(self._model))
        except PlanningError:
            return 0.0

    def _cost(self) -> float:
        """Seconds of a look and a move; a step's before any was measured."""
        progress, costs = self._progress, self._costs()
        if progress.move_seconds is not None:
            return progress.move_seconds + progress.look_seconds
        if costs is None:
            return 0.0
        return self.stretch() * self._predicted(self._model.stages, costs) + progress.look_seconds

    def _costs(self) -> LayerCosts | None:
        """Costs of the layers by now; right after they were reset, the last measured."""
        return self._model.profile.expected() or self._progress.costs

    def _step_seconds(self, stages: tuple[Stage, ...], costs: LayerCosts) -> float:
        """Seconds of a predicted step."""
        return balancer_input(self._model, costs, stages).step_seconds(partition_of(stages))
