"""Costs of each layer, from the last steps that were measured; the same on every rank."""

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence

from ballast_policies.planning.following.looking import expected_costs
from ballast_policies.planning.memory.measured_layers import MeasuredLayers

KEPT_STEPS = 8
"""Steps whose median is a layer's cost."""
MEASURED_EVERY = 8
"""Steps of which one is measured, after the first KEPT_STEPS."""

DRIFT = 0.25
"""Change of a layer's seconds that, seen in two measured steps in a row, makes older ones obsolete."""
SLOW_DRIFT = 0.08
"""Mean relative difference between the halves of the steps kept from which more steps are measured."""
_ABOVE_NOISE = 1.6
"""Difference over the mean deviation within the halves, above which it is no noise."""
_OUTLIER = 4.0
"""Change of a layer's seconds over its median deviation in the steps kept, above which it is no noise."""
_FEWEST = 4
"""Steps from which a median can be told apart from noise."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Seconds per step of each layer, over all ranks: of forwards, backwards and the optimizer."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    optimizer: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        """Seconds per step of each layer."""
        return tuple(map(sum, zip(self.forward, self.backward, self.optimizer, strict=True)))


class Profile:
    """Layer costs by the last measured steps, on every rank the same: their median, and where they lead.

    Attributes:
        follows: whether steps that differ, and costs that drift, are looked at more often: not on one rank,
            where no layer can move, and looking at small layers takes as long as they do.
    """

    def __init__(self, layer_count: int) -> None:
        self.layer_count = layer_count
        self.follows = True
        self._steps: deque[list[float]] = deque(maxlen=KEPT_STEPS)
        self._numbers: deque[int] = deque(maxlen=KEPT_STEPS)
        self._median: LayerCosts | None = None
        self._expected: dict[bool, LayerCosts] = {}
        self._bytes: deque[Sequence[float]] = deque(maxlen=KEPT_STEPS)
        self._suspects: frozenset[tuple[int, bool]] = frozenset()
        self._every = MEASURED_EVERY

    def __len__(self) -> int:
        return len(self._steps)

    def wants(self, step: int) -> bool:
        """True if ``step`` is to be measured: the first ones after a change, then one in MEASURED_EVERY.

        And the one after a step that differs: where the content decides what layers compute, no step is
        known in advance at which their costs change.  While they drift, more steps are measured: twice as
        many after each that finds the newer half of those kept apart from the older half.
        """
        return len(self._steps) < KEPT_STEPS or bool(self._suspects) or step % self._every == 0

    def add(self, seconds: list[float], counted: Sequence[float] = (), *, step: int = 0) -> None:
        """Add one step.

        Args:
            seconds: the 3 L seconds of all ranks, summed; the optimizer's are of the step before where it
                runs after the sum.
            counted: 4 L bytes of all ranks, as of :class:`~ballast_trainer.profiling.meter.Meter`.
            step: its number; at least the one after the last added.
        """
        suspects = self._changed(seconds) if self.follows else frozenset()
        if suspects & self._suspects:
            # The costs have changed: only the two steps that show it count from here on.
            newest, number = self._steps[-1], self._numbers[-1]
            self._drop()
            self._keep(newest, number)
            suspects = frozenset()
        self._suspects = suspects
        self._keep(seconds, max(step, self._numbers[-1] + 1) if self._numbers else step)
        if len(self._steps) == KEPT_STEPS and self.follows:
            self._every = max(1, self._every // 2) if self._drifts() else min(MEASURED_EVERY, self._every * 2)
        if counted:
            self._bytes.append(counted)

    def forget(self) -> None:
        """Drop the measurements: the layers' costs have changed."""
        self._drop()
        self._bytes.clear()
        self._suspects = frozenset()
        self._every = MEASURED_EVERY

    def _keep(self, seconds: list[float], step: int) -> None:
        self._steps.append(seconds)
        self._numbers.append(step)
        self._median = None
        self._expected.clear()

    def _drop(self) -> None:
        self._steps.clear()
        self._numbers.clear()
        self._median = None
        self._expected.clear()

    def _drifts(self) -> bool:
        """True if the layers' seconds differ between the older and the newer half of the steps kept."""
        steps, both = list(self._steps), range(2 * self.layer_count)
        halves = steps[: KEPT_STEPS // 2], steps[KEPT_STEPS // 2 :]
        older, newer = (
            [statistics.median(step[entry] for step in half) for entry in both] for half in halves
        )
        apart = sum(abs(a - b) for a, b in zip(older, newer, strict=True))
        if apart <= SLOW_DRIFT * sum(older):
            return False
        # Of costs that drift steadily four times the deviation within a half, of noise 1.2 times.
        spread = sum(
            abs(step[entry] - usual[entry])
            for half, usual in zip(halves, (older, newer), strict=True)
            for step in half
            for entry in both
        )
        return apart > _ABOVE_NOISE * spread / KEPT_STEPS

    def _changed(self, seconds: Sequence[float]) -> frozenset[tuple[int, bool]]:
        """Layers whose forward and backward differ from the median, and whether they have grown."""
        costs = self.costs()
        if costs is None or len(self._steps) < _FEWEST:
            return frozenset()
        count = self.layer_count
        before = [costs.forward[layer] + costs.backward[layer] for layer in range(count)]
        small = sum(before) / count / 4
        found = set()
        for layer, usual in enumerate(before):
            change = seconds[layer] + seconds[count + layer] - usual
            noise = statistics.median(abs(step[layer] + step[count + layer] - usual) for step in self._steps)
            if abs(change) > max(DRIFT * max(usual, small), _OUTLIER * noise):
                found.add((layer, change > 0))
        return frozenset(found)

    def bytes(self) -> MeasuredLayers | None:
        """A microbatch's most bytes of the last steps, over all ranks; None: no forward was counted."""
        if not self._bytes:
            return None
        n, most = self.layer_count, [round(max(column)) for column in zip(*self._bytes, strict=True)]
        rows = [tuple(most[n * row : n * (row + 1)]) for row in range(4)]
        return MeasuredLayers(
            activation_bytes=rows[0], output_bytes=rows[1], gradient_bytes=rows[2], repeated_bytes=rows[3]
        )

    def costs(self) -> LayerCosts | None:
        """The median step; None before the first."""
        if self._median is None and self._steps:
            columns = zip(*self._steps, strict=True)
            self._median = self._as_costs([statistics.median(column) for column in columns])
        return self._median

    def measured(self) -> list[list[float]]:
        """Seconds of each layer in the steps kept, by step, shape (n, L)."""
        n = self.layer_count
        return [[sum(step[layer::n]) for layer in range(n)] for step in self._steps]

    def expected(self, *, coming: bool = False) -> LayerCosts | None:
        """Cost of a step by now; the median where there is no trend, and None before the first measured.

        It changes with a measured step alone: "now" is midway to the next one.

        Args:
            coming: not by now, but in the middle of the steps for which layers that move would stay: as far
                past the last measured step as half of those kept span.
        """
        if not self._steps:
            return None
        found = self._expected.get(coming)
        if found is None:
            newest = self._numbers[-1]
            awaited = 1 if self.wants(newest + 1) else self._every - newest % self._every
            ahead = (newest - self._numbers[0]) / 2 if coming else (awaited - 1) / 2
            found = self._as_costs(expected_costs(self._numbers, self._steps, newest + 1 + ahead))
            self._expected[coming] = found
        return found

    def _as_costs(self, seconds: Sequence[float]) -> LayerCosts:
        n = self.layer_count
        return LayerCosts(
            forward=tuple(seconds[:n]), backward=tuple(seconds[n : 2 * n]), optimizer=tuple(seconds[2 * n :])
        )
