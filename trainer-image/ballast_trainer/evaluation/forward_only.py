"""The stages of a partition run forward only, without gradients and without measuring anything.

Independent of the job's schedule: every rank runs the microbatches of its first stage, then of its next one.
A rank waits for its inputs and never for a receiver before the end of the batch, so no order of stages can
stall.  An activation is sent after its form, which may differ from that in training, where it is a new one.
"""

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract import Stage
from ballast_policies.planning.schedules.schedule import Action, Kind, Schedule

from ballast_trainer.causes import note_input, note_layer
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.layers.boundaries import Boundary, wire
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.precision import computing_in
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.pipeline.executor.groups import Link, link_groups
from ballast_trainer.seeding import mixed_key, seed_layer
from ballast_trainer.trees import Tree, chunks, flatten, tensors_of, unflatten

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

    def run(self, inputs: Tree, targets: torch.Tensor | None, groups: Any, number: int) -> list[float]:
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
        sources = chunks(inputs, count) if inputs is not None else ()
        wanted = targets.chunk(count) if targets is not None else ()
        kept: dict[tuple[int, int], Tree] = {}
        sending: list[tuple[torch.Tensor, Any]] = []
        forms: dict[Link, Boundary] = {}
        totals = [0.0] * len(self.scores)
        for stage in range(last + 1):
            for microbatch in range(count):
                if self._holder(stage, microbatch) != self.position:
                    continue
                if stage == 0:
                    value: Tree = sources[microbatch]
                elif self._holder(stage - 1, microbatch) == self.position:
                    value = kept.pop((stage, microbatch))
                else:
                    value = self._receive(groups, forms, stage, self._holder(stage - 1, microbatch))
                value = self._compute(stage, microbatch, number, value)
                if stage == last:
                    found = [score(value, wanted[microbatch]) for score in self.scores]
                    totals = [total + one for total, one in zip(totals, found, strict=True)]
                elif self._holder(stage + 1, microbatch) == self.position:
                    kept[stage + 1, microbatch] = value
                else:
                    sending += self._send(groups, forms, stage, self._holder(stage + 1, microbatch), value)
        for _, work in sending:
            work.wait()
        return [total / count for total in totals]

    def _holder(self, stage: int, microbatch: int) -> int:
        holders = self.holders[stage]
        return holders[microbatch % len(holders)]

    def _compute(self, stage: int, microbatch: int, number: int, value: Tree) -> Tree:
        device = self.layers.device
        key = mixed_key(self.layers.seed, _EVALUATION, number, self.first_microbatch + microbatch)
        # None of a step's own microbatches: what the layers note for the next step stays as it is.
        CURRENT_FORWARD.set(CURRENT_FORWARD.step, None)
        with computing_in(self.precision, device):
            for index in range(self.stages[stage].first_layer, self.stages[stage].end_layer):
                layer = self.layers[index]
                seed_layer(device, key, index)
                try:
                    with ACTIVITY.doing("an evaluation's forward of layer", index):
                        layer.gather()
                        value = layer.module(layer.taken(value))
                        flatten(value)
                except Exception as error:
                    note_layer(error, index, type(layer.module).__name__)
                    note_input(error, index, value)
                    raise
        return value

    def _send(
        self, groups: Any, forms: dict[Link, Boundary], stage: int, target: int, value: Tree
    ) -> list[tuple[torch.Tensor, Any]]:
        link = stage, False, self.position, target
        form, device = Boundary.of(value), self.layers.device
        told = b"" if forms.get(link) == form else pickle.dumps(form)
        forms[link] = form
        parts = [torch.tensor([len(told)], device=device)]
        if told:
            parts.append(torch.frombuffer(bytearray(told), dtype=torch.uint8).to(device))
        parts += [wire(tensor.detach().contiguous()) for tensor in tensors_of(value) if tensor.numel() > 0]
        return [(part, dist.isend(part, dst=self.line[target], group=groups[link])) for part in parts]

    def _receive(self, groups: Any, forms: dict[Link, Boundary], stage: int, source: int) -> Tree:
        link, device = (stage - 1, False, source, self.position), self.layers.device

        def received(into: torch.Tensor) -> torch.Tensor:
            if into.numel() > 0:
                dist.recv(wire(into), src=self.line[source], group=groups[link])
            return into

        told = int(received(torch.zeros(1, dtype=torch.int64, device=device)))
        if told:
            sent = received(torch.empty(told, dtype=torch.uint8, device=device))
            forms[link] = pickle.loads(sent.cpu().numpy().tobytes())
        form = forms[link]
        return unflatten(form.structure, (received(one.empty(device)) for one in form.tensors))
