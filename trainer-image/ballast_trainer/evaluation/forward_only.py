"""The stages of a partition run forward only, without gradients and without measuring anything.

Independent of the job's schedule: every rank runs the microbatches of its first stage, then of its next one.
A rank waits for its inputs and never for a receiver before the end of the batch, so no order of stages can
stall.  An activation is sent after its shape and type, which may differ from those in training.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract import Stage
from ballast_policies.planning.schedules import Action, Kind, Schedule

from ballast_trainer.causes import note_input, note_layer
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.precision import computing_in
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.pipeline.executor.groups import link_groups
from ballast_trainer.seeding import mixed_key, seed_layer

_MOST_DIMENSIONS = 14
_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_EVALUATION = 0xE7A1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardOnly:
    """This rank's stages, and the way to those of the others.

    Attributes:
        stages: the partition; their ranks count pipeline positions.
        holders: by stage, the positions that hold it; microbatch k is computed by number k mod their count.
        position: of this rank.
        line: the rank at each position of this pipeline.
        lines: those of every pipeline, in one order everywhere.
        layers: that this rank holds.
        microbatches: of a batch, on this replica of the pipeline.
        first_microbatch: place of this replica's first one among those of the whole batch.
        scores: figures of one microbatch, from the last layer's output and the targets.
        precision: what layers compute in.
    """

    stages: Sequence[Stage]
    holders: Sequence[Sequence[int]]
    position: int
    line: Sequence[int]
    lines: Sequence[Sequence[int]]
    layers: LayerSet
    microbatches: int
    first_microbatch: int
    scores: Sequence[Callable[[torch.Tensor, torch.Tensor], float]]
    precision: str

    @property
    def reads_data(self) -> bool:
        """Whether this rank needs the batch: at the ends of the pipeline."""
        return self.position in self.holders[0] or self.position in self.holders[-1]

    def groups(self) -> Any:
        """The process groups of its messages; collective over all ranks."""
        count, ranks = self.microbatches, len(self.line)
        if ranks == 1:
            return {}
        rows: list[list[Action]] = [[] for _ in range(ranks)]
        for stage, holders in enumerate(self.holders):
            for microbatch in range(count):
                rank = holders[microbatch % len(holders)]
                rows[rank].append(Action(stage, Kind.FORWARD, microbatch))
        schedule = Schedule(
            name="forward only",
            microbatches=count,
            stage_ranks=tuple(map(tuple, self.holders)),
            actions=tuple(map(tuple, rows)),
            update_every=count,
        )
        return link_groups(schedule, self.lines, self.line)

    def run(
        self, inputs: torch.Tensor | None, targets: torch.Tensor | None, groups: Any, number: int
    ) -> list[float]:
        """Run one batch; collective over the ranks of the pipeline.

        Args:
            inputs: this replica's part of the batch; None where :attr:`reads_data` is false.
            targets: those of it.
            groups: of :meth:`groups`.
            number: of the batch, from which random numbers of layers follow.

        Returns:
            This rank's part of each score's mean over the replica's microbatches; the parts add up to it.
        """
        count, last = self.microbatches, len(self.holders) - 1
        sources = inputs.chunk(count) if inputs is not None else ()
        wanted = targets.chunk(count) if targets is not None else ()
        kept: dict[tuple[int, int], torch.Tensor] = {}
        sending: list[tuple[torch.Tensor, Any]] = []
        totals = [0.0] * len(self.scores)
        for stage in range(last + 1):
            for microbatch in range(count):
                if self._holder(stage, microbatch) != self.position:
                    continue
                if stage == 0:
                    value = sources[microbatch]
                elif self._holder(stage - 1, microbatch) == self.position:
                    value = kept.pop((stage, microbatch))
                else:
                    value = self._receive(groups, stage, self._holder(stage - 1, microbatch))
                value = self._compute(stage, microbatch, number, value)
                if stage == last:
                    found = [score(value, wanted[microbatch]) for score in self.scores]
                    totals = [total + one for total, one in zip(totals, found, strict=True)]
                elif self._holder(stage + 1, microbatch) == self.position:
                    kept[stage + 1, microbatch] = value
                else:
                    sending += self._send(groups, stage, self._holder(stage + 1, microbatch), value)
        for _, work in sending:
            work.wait()
        return [total / count for total in totals]

    def _holder(self, stage: int, microbatch: int) -> int:
        holders = self.holders[stage]
        return holders[microbatch % len(holders)]

    def _compute(self, stage: int, microbatch: int, number: int, value: torch.Tensor) -> torch.Tensor:
        device = self.layers.device
        key = mixed_key(self.layers.seed, _EVALUATION, number, self.first_microbatch + microbatch)
        # None of a step's own microbatches: what the layers note for the next step stays as it is.
        CURRENT_FORWARD.set(CURRENT_FORWARD.step, None)
        with computing_in(self.precision, device):
            for index in range(self.stages[stage].first_layer, self.stages[stage].end_layer):
                module = self.layers[index].module
                seed_layer(device, key, index)
                try:
                    with ACTIVITY.doing("an evaluation's forward of layer", index):
                        value = module(value)
                    if not isinstance(value, torch.Tensor):
                        raise TypeError(f"it returns {type(value).__name__}, not a tensor")
                except Exception as error:
                    note_layer(error, index, type(module).__name__)
                    note_input(error, index, value)
                    raise
        return value

    def _send(
        self, groups: Any, stage: int, target: int, value: torch.Tensor
    ) -> list[tuple[torch.Tensor, Any]]:
        group, value = groups[stage, False, self.position, target], value.detach().contiguous()
        if value.dtype not in _TYPES or value.dim() > _MOST_DIMENSIONS:
            raise TrainerError(
                f"stage {stage} sends {value.dtype} {list(value.shape)} in an evaluation. To fix: let its "
                f"last layer return one of {', '.join(map(str, _TYPES))}, of at most {_MOST_DIMENSIONS} "
                "dimensions"
            )
        head = [_TYPES.index(value.dtype), value.dim(), *value.shape]
        head += [0] * (_MOST_DIMENSIONS + 2 - len(head))
        header = torch.tensor(head, dtype=torch.int64, device=value.device)
        return [(part, dist.isend(part, dst=self.line[target], group=group)) for part in (header, value)]

    def _receive(self, groups: Any, stage: int, source: int) -> torch.Tensor:
        group, device = groups[stage - 1, False, source, self.position], self.layers.device
        header = torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=device)
        dist.recv(header, src=self.line[source], group=group)
        kind, dimensions, *shape = header.tolist()
        value = torch.empty(shape[:dimensions], dtype=_TYPES[kind], device=device)
        dist.recv(value, src=self.line[source], group=group)
        return value
