"""Speeds of two jobs on one GPU, relative to their speeds alone (dissertation section 5.3.3).

What a job reports while another is on its GPU has the other's kind in its key, and is never taken for its
speed alone. A pair that has not run together is estimated from the pairs that have, by matrix completion.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from ballast_policies.throughput.estimator import complete
from ballast_policies.throughput.speeds import SpeedKey, Speeds

FIRST_GUESS = 0.6
"""Speed in a pair over that alone, before any pair has been measured on a GPU type: the mean over pairs of
one-GPU jobs in the measurements that Gavel's simulations use is 0.54 on K80, 0.60 on P100, 0.66 on V100."""

LEAST, MOST = 0.05, 1.0
"""Of an estimate: sharing makes no job faster, and none stands still."""

MOST_KINDS = 100
"""Kinds of a matrix that is completed, the newest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Relative:
    """Speed of a job beside another over its speed alone.

    Attributes:
        value: from 0 to 1.
        measured: a job of the kind has run so; otherwise it is an estimate.
    """

    value: float
    measured: bool


@dataclasses.dataclass(frozen=True)
class PairSpeeds:
    """Measured speeds of pairs.

    Attributes:
        measured: GPU type -> (kind, the partner's kind) -> speed over that alone.
    """

    measured: Mapping[str, Mapping[tuple[str, str], float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, kinds: Mapping[str, Speeds], stated: Mapping[str, Mapping[str, float]] | None = None
    ) -> "PairSpeeds":
        """Speeds of pairs from those of each kind, alone and beside others.

        ``stated``: kind -> GPU type -> steps/s alone, which count where none was measured.
        """
        found: dict[str, dict[tuple[str, str], float]] = {}
        for kind, speeds in kinds.items():
            for key, estimate in speeds.items():
                if not key.partner:
                    continue
                gpu_type, gpus = key.gpus[0]
                known = speeds.get(SpeedKey.of(gpu_type, gpus))
                said = (stated or {}).get(kind, {}).get(gpu_type, 0.0)
                alone = said if known is None else known.steps_per_second
                if alone > 0:
                    relative = min(MOST, estimate.steps_per_second / alone)
                    found.setdefault(gpu_type, {})[kind, key.partner] = relative
        return cls(found)

    def relative(self, kind: str, partner: str, gpu_type: str) -> Relative:
        """Speed of a job of ``kind`` beside one of ``partner`` over its speed alone, on a GPU of the type."""
        known = self.measured.get(gpu_type, {})
        if (kind, partner) in known:
            return Relative(known[kind, partner], measured=True)
        if not known:
            return Relative(FIRST_GUESS, measured=False)
        rows, values = self._completed[gpu_type]
        # The last row and column are those of a kind that has run in no pair.
        return Relative(float(values[rows.get(kind, -1), rows.get(partner, -1)]), measured=False)

    @functools.cached_property
    def _completed(self) -> dict[str, tuple[dict[str, int], np.ndarray]]:
        """GPU type -> (kind -> row and column, matrix of estimates)."""
        found = {}
        for gpu_type, known in self.measured.items():
            names = dict.fromkeys(name for pair in known for name in pair)
            rows = {name: row for row, name in enumerate(list(names)[-MOST_KINDS:])}
            matrix = np.full((len(rows) + 1, len(rows) + 1), np.nan)
            for (kind, partner), value in known.items():
                if kind in rows and partner in rows:
                    matrix[rows[kind], rows[partner]] = value
            seen = np.isfinite(matrix)
            if not seen.any():
                matrix[:] = FIRST_GUESS
            else:
                matrix = complete(np.nan_to_num(matrix), seen).values
            found[gpu_type] = rows, np.clip(matrix, LEAST, MOST)
        return found
