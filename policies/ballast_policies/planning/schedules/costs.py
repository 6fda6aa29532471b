"""Costs of a schedule's actions: seconds by stage; stages may be uneven."""

import dataclasses
from collections.abc import Sequence

from ballast_policies.planning.partition import Partition
from ballast_policies.planning.schedules.schedule import Kind, ScheduleError

_ACTIONS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 1.0,
    Kind.BACKWARD_INPUT: 0.5,
    Kind.BACKWARD_WEIGHT: 0.5,
    Kind.UPDATE: 0.0,
}
"""Weight of an action by its kind."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds of one microbatch by stage, at speed 1.

    Attributes:
        forward: by stage.
        backward: by stage, inputs and weights together.
        backward_input: by stage, the part that the stage before waits for; default: half the backward.
        update: by stage, seconds of one optimizer step, gradient exchange of its replicas included.
        transfer: by boundary (between stage s and s + 1), seconds of one activation or gradient;
            nothing where both stages are on one rank.
        speeds: by rank, relative; default all 1.
        action_seconds: what every rank needs for each forward and each backward besides, whatever its speed
            (bookkeeping, waking up, the network's latency); half of it for each half of a split backward.
        serial_links: True: a pair of ranks carries one transfer at a time each way. False: transfers
            overlap, as AMP's cost model has it.

    Raises:
        ScheduleError: lengths that do not match, or negative seconds.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()
    action_seconds: float = 0.0
    serial_links: bool = False

    def __post_init__(self) -> None:
        stages = len(self.forward)
        wanted = {"backward": stages, "backward_input": stages, "update": stages, "transfer": stages - 1}
        for name, count in wanted.items():
            given = len(getattr(self, name))
            if (given or name == "backward") and given != count:
                raise ScheduleError(f"{name} has {given} values for {stages} stages, not {count}")
        values = self.forward + self.backward + self.backward_input + self.update + self.transfer
        if min(*values, self.action_seconds) < 0 or any(speed <= 0 for speed in self.speeds):
            raise ScheduleError("seconds must be at least 0 and speeds above 0")
        if any(i > b for i, b in zip(self.backward_input, self.backward, strict=False)):
            raise ScheduleError("backward_input is a part of backward and cannot take longer")

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    def seconds(self, kind: Kind, stage: int, rank: int) -> float:
        """Seconds that ``kind`` of one microbatch (or one update) of ``stage`` takes on ``rank``."""
        whole = self.backward[stage]
        for_input = self.backward_input[stage] if self.backward_input else whole / 2
        seconds = {
            Kind.FORWARD: self.forward[stage],
            Kind.BACKWARD: whole,
            Kind.BACKWARD_INPUT: for_input,
            Kind.BACKWARD_WEIGHT: whole - for_input,
            Kind.UPDATE: self.update[stage] if self.update else 0.0,
        }[kind]
        if self.speeds:
            seconds /= self.speeds[rank]
        return seconds + self.action_seconds * _ACTIONS[kind]

    def transfer_seconds(self, boundary: int) -> float:
        """One activation or gradient over the boundary between ``boundary`` and the next stage."""
        return self.transfer[boundary] if self.transfer else 0.0


def even_costs(
    stages: int, *, forward: float = 1.0, backward: float = 2.0, backward_input: float | None = None
) -> StageCosts:
    """Equal stages and no transfer time, as the bubble formulas assume."""
    return StageCosts(
        forward=(forward,) * stages,
        backward=(backward,) * stages,
        backward_input=() if backward_input is None else (backward_input,) * stages,
    )


def stage_costs(
    partition: Partition,
    *,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    microbatches: int,
    update_seconds: Sequence[float] | None = None,
    boundary_seconds: Sequence[float] = (),
    speeds: Sequence[float] = (),
) -> StageCosts:
    """Costs of a partition's stages from a profile of its layers; links carry one transfer at a time.

    Args:
        partition: layers to stages (its "ranks" are the stages).
        forward_seconds: of each layer, per step (all microbatches), shape (L,).
        backward_seconds: of each layer, per step, shape (L,).
        microbatches: per step.
        update_seconds: optimizer seconds of each layer, per step, shape (L,).
        boundary_seconds: transfer of one microbatch after each layer but the last, shape (L - 1,).
        speeds: by rank.
    """
    update = () if update_seconds is None else tuple(partition.loads(update_seconds).tolist())
    cuts = partition.bounds[1:-1]
    return StageCosts(
        forward=tuple((partition.loads(forward_seconds) / microbatches).tolist()),
        backward=tuple((partition.loads(backward_seconds) / microbatches).tolist()),
        update=update,
        transfer=tuple(float(boundary_seconds[cut - 1]) for cut in cuts) if len(boundary_seconds) else (),
        speeds=tuple(speeds),
        serial_links=len(boundary_seconds) > 0,
    )
