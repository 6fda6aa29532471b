"""One throughput as it is known so far: a prior, and measurements that slowly take its place.

The logarithm of the rate is tracked by a scalar Kalman filter.  At first its gain is large and
each report counts as its own; then the gain settles at ALPHA, where it is the exponential moving
average with which Gavel follows measured throughputs (section 5.6), so that a job whose layers get
cheaper is followed too.
"""

import dataclasses
import math

ALPHA = 0.5
"""Weight of a new measurement against what is known, in the long run."""

MEASUREMENT_DEVIATION = 0.05
"""Relative standard deviation of one report of steps/s."""

# The drift per report at which the filter's gain settles at ALPHA: q = s^2 alpha^2 / (1 - alpha).
DRIFT_VARIANCE = MEASUREMENT_DEVIATION**2 * ALPHA**2 / (1.0 - ALPHA)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A throughput with what is not known about it.

    Attributes:
        steps_per_second: of the whole gang; 0: it does not fit.
        deviation: relative standard deviation; 0.3: one time in three it is off by more than about 30 %.
        source: ``measured``, ``prior`` (a job type that was profiled), ``completed`` (by matrix
            completion) or ``unknown``.
        reports: how many measurements are in it.
    """

    steps_per_second: float
    deviation: float
    source: str
    reports: int = 0

    def measured(self, steps_per_second: float) -> "Estimate":
        """The estimate after one more measurement.

        Raises:
            ValueError: the measurement is not positive and finite.
        """
        if not (steps_per_second > 0 and math.isfinite(steps_per_second)):
            raise ValueError(
                f"a measured throughput of {steps_per_second} steps/s is not positive and finite"
            )
        if self.steps_per_second <= 0 or not math.isfinite(self.deviation):
            return Estimate(
                steps_per_second=steps_per_second,
                deviation=MEASUREMENT_DEVIATION,
                source="measured",
                reports=self.reports + 1,
            )
        variance = self.deviation**2 + (DRIFT_VARIANCE if self.reports else 0.0)
        gain = variance / (variance + MEASUREMENT_DEVIATION**2)
        log_rate = math.log(self.steps_per_second)
        log_rate += gain * (math.log(steps_per_second) - log_rate)
        return Estimate(
            steps_per_second=math.exp(log_rate),
            deviation=math.sqrt((1.0 - gain) * variance),
            source="measured",
            reports=self.reports + 1,
        )
