"""The agreement of all ranks after a step: one vector, summed over them."""

import dataclasses

from ballast_trainer.loop.state import TrainingState
from ballast_trainer.pipeline.gradients import squared_norm_once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The values that all ranks have agreed on after a step."""

    stop: bool
    epoch: int
    loss: float
    squared_norm: float
    exchange: bool
    check_rebalance: bool
    save: bool
    written: bool
    end: bool
    probes: list[float]
    peak_flops: float
    seconds: list[float]
    activation_bytes: list[float]
    passing_bytes: list[float]


_HEAD = 10
"""Entries of a rank's summand before those of positions and layers."""


def figures(
    training: TrainingState,
    loss: float | None,
    *,
    stop_votes: int,
    newest_epoch: int,
    check_rebalance: bool,
    save: bool,
    written: bool,
    end: bool,
    peak_flops: float,
) -> list[float]:
    """This rank's summand.

    Args:
        training: the job.
        loss: this rank's part of the step's loss; None where it has none.
        stop_votes: of this rank for the end of the job; see ``StopSignal.votes``.
        newest_epoch: of the newest plan, on rank 0; 0 on other ranks.
        check_rebalance: whether rank 0 wants to look at the partition.
        save: whether rank 0 wants a checkpoint.
        written: whether this rank writes no checkpoint, or has written its part of it.
        end: whether this rank's callback has asked for the end of the job.
        peak_flops: this rank's, by its data sheet.
    """
    # Every rank of a column of the mesh has the stage's loss and seconds: together they count once.
    share = 1 / training.world.mesh.column
    meter, timed = training.meter, 3 * training.model.layer_count
    layers = training.world.tensor.largest(
        meter.seconds() + meter.activation_bytes + meter.passing_bytes, training.device
    )
    seconds, kept = layers[:timed], layers[timed:]
    return [
        float(stop_votes),
        float(newest_epoch),
        share * loss if loss is not None else 0.0,
        squared_norm_once(training.world, training.layers) / training.copies,
        float(training.straggler_mitigation.wants_exchange),
        float(check_rebalance),
        peak_flops,
        float(save),
        float(end),
        float(written),
        *(share * second for second in training.probe_seconds()),
        *(share * second for second in seconds),
        # Copies of a layer keep equal bytes each, and share the seconds.
        *(share / training.copies * count for count in kept),
    ]


def agreed_values(training: TrainingState, summed: list[float]) -> Agreed:
    """The sum of all ranks' figures, by name."""
    count, first = training.model.layer_count, _HEAD + training.world.positions
    end = first + 3 * count
    return Agreed(
        stop=summed[0] >= training.world.size,
        epoch=round(summed[1]),
        loss=summed[2] / training.loss_scale.value,
        squared_norm=summed[3],
        exchange=summed[4] > 0,
        check_rebalance=summed[5] > 0,
        peak_flops=summed[6],
        save=summed[7] > 0,
        end=summed[8] > 0,
        written=summed[9] >= training.world.size,
        probes=summed[_HEAD:first],
        seconds=summed[first:end],
        activation_bytes=summed[end : end + count],
        passing_bytes=summed[end + count :],
    )
