"""Closed forms for GPT-like models: parameters, FLOPs, days of training, step time (dissertation 4.3, 4.5).

l layers, hidden size h, sequence length s, vocabulary V; B samples a batch; n GPUs in p x t x d.
"""

import dataclasses
from math import sqrt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a GPT-like model.

    Attributes:
        layers: l.
        hidden: h.
        sequence: s, tokens of a sample.
        vocabulary: V.
    """

    layers: int
    hidden: int
    sequence: int
    vocabulary: int

    @property
    def parameters(self) -> float:
        """P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h))."""
        l, h = self.layers, self.hidden  # noqa: E741
        return 12 * l * h**2 * (1 + 13 / (12 * h) + (self.vocabulary + self.sequence) / (12 * l * h))

    def step_flops(self, batch_size: int) -> float:
        """F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)), recomputation included."""
        l, h, s = self.layers, self.hidden, self.sequence  # noqa: E741
        return 96 * batch_size * s * l * h**2 * (1 + s / (6 * h) + self.vocabulary / (16 * l * h))


def training_seconds(*, tokens: float, parameters: float, gpus: int, flops_per_second: float) -> float:
    """About 8 T P / (n X): the whole training with recomputation, X achieved by each GPU."""
    return 8 * tokens * parameters / (gpus * flops_per_second)


def step_seconds(
    *, batch_per_pipeline: float, microbatch_size: float, stages: int, microbatch_seconds: float
) -> float:
    """(b' / b + p - 1) (tf(b) + tb(b)), equation 4.1; b' = B / d samples a pipeline."""
    return (batch_per_pipeline / microbatch_size + stages - 1) * microbatch_seconds


def best_checkpoints(layers: int, *, intermediate_bytes: float, input_bytes: float) -> float:
    """The c = sqrt(l Aint / Ain): checkpoints of a stage of l layers with the least memory (4.3.5)."""
    return sqrt(layers * intermediate_bytes / input_bytes)


def checkpointed_bytes(
    layers: int, checkpoints: float, *, intermediate_bytes: float, input_bytes: float
) -> float:
    """Bytes of c checkpoints: c Ain + l / c Aint (4.3.5)."""
    return checkpoints * input_bytes + layers / checkpoints * intermediate_bytes
