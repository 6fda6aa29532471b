"""Bytes of PipeDream-2BW and GPipe by closed forms, for a model of equal blocks (dissertation 3.3.3).

Of microbatches of size b in p stages:

    bytes = 2 W / p + A + p Ain          without recomputation (p activations of A / p each)
    bytes = 2 W / p + A / p + p Ain      with it
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockModel:
    """Bytes of a model of equal blocks.

    Attributes:
        weight_bytes: W, of the whole model, optimizer state included.
        activation_bytes: A of one sample, whole model.
        boundary_bytes: Ain of one sample: what enters a stage.
    """

    weight_bytes: float
    activation_bytes: float
    boundary_bytes: float


def memory_bytes(model: BlockModel, stages: int, microbatch_size: int, *, recompute: bool) -> float:
    """2BW: two weight versions, p activations in flight (or one, and the inputs to recompute from)."""
    activations = model.activation_bytes * microbatch_size
    inputs = stages * model.boundary_bytes * microbatch_size
    return 2 * model.weight_bytes / stages + activations / (stages if recompute else 1) + inputs


def gpipe_memory_bytes(model: BlockModel, stages: int, microbatch_size: int, microbatches: int) -> float:
    """GPipe with recomputation: one weight version, the inputs of all m microbatches."""
    activations = model.activation_bytes * microbatch_size / stages
    return model.weight_bytes / stages + activations + microbatches * model.boundary_bytes * microbatch_size
