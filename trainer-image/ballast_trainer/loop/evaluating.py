"""The loss on validation data, measured between two steps; training continues as if there had been none."""

import contextlib
import dataclasses
import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ballast_trainer.causes import EVALUATION_NOTE, note_input, note_layer
from ballast_trainer.data.sources import read_batch
from ballast_trainer.distributed.activity import ACTIVITY, Limit
from ballast_trainer.errors import DataError
from ballast_trainer.layers.boundaries import Boundary, wire
from ballast_trainer.layers.buffers import evaluating, in_place_of_loss
from ballast_trainer.layers.precision import computing_in, in_full_precision
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.loop.batches import compared, own_part, refuse_other_targets, targets_digest
from ballast_trainer.loop.plan_following import PlanFollower
from ballast_trainer.loop.progress import Progress
from ballast_trainer.loop.saving import Saver
from ballast_trainer.loop.state import ModelState
from ballast_trainer.loop.validation_data import ValidationData
from ballast_trainer.models.loss_weights import one_number, weighted, weights_of
from ballast_trainer.models.protocol import Metric
from ballast_trainer.pipeline.executor.links import Link, link_groups
from ballast_trainer.seeding import mixed_key, seed_layer
from ballast_trainer.trees import Tree, chunks, flatten, tensors_of, unflatten

_EVALUATION = 0xE7A1


class ForwardOnly:
    """This rank's stages, run forward only, and the way to those of the others.

    Independent of the job's schedule: every rank runs the microbatches of its first stage, then of its next
    one.  A rank waits for its inputs and never for a receiver before the end of the batch, so no order of
    stages can stall.  An activation is sent after its form, which may differ from that in training.

    Microbatch k of a stage is computed by number k mod the count of those that hold it.
    """

    def __init__(
        self, model: ModelState, scores: Sequence[Callable[[torch.Tensor, torch.Tensor], float]]
    ) -> None:
        """Make the process groups of its messages; collective over all ranks.

        ``scores``: figures of one microbatch, from the last layer's output and the targets.
        """
        self._model, self._scores = model, scores
        self._holders, self._position = model.holders, model.world.position
        self._line = model.world.pipeline.ranks
        self._groups: Mapping[Link, Any] = {}
        if model.world.positions > 1:
            lines = model.world.mesh.lines("position", model.world.size)
            self._groups = link_groups(self._holders, model.microbatches, lines, self._line)

    def run(self, inputs: Tree, targets: torch.Tensor | None, number: int) -> list[float]:
        """Run one batch; collective over the ranks of the pipeline.

        Args:
            inputs: this replica's part of the batch; None between the ends of the pipeline.
            targets: those of it.
            number: of the batch, from which random numbers of layers follow.

        Returns:
            This rank's part of each score's mean over the replica's microbatches; the parts add up to it.
        """
        count, last = self._model.microbatches, len(self._holders) - 1
        sources = chunks(inputs, count) if inputs is not None else ()
        wanted = targets.chunk(count) if targets is not None else ()
        kept: dict[tuple[int, int], Tree] = {}
        sending: list[tuple[torch.Tensor, Any]] = []
        forms: dict[Link, Boundary] = {}
        totals = [0.0] * len(self._scores)
        for stage in range(last + 1):
            for microbatch in range(count):
                if self._holder(stage, microbatch) != self._position:
                    continue
                if stage == 0:
                    value: Tree = sources[microbatch]
                elif self._holder(stage - 1, microbatch) == self._position:
                    value = kept.pop((stage, microbatch))
                else:
                    value = self._receive(forms, stage, self._holder(stage - 1, microbatch))
                value = self._compute(stage, microbatch, number, value)
                if stage == last:
                    with ACTIVITY.doing("the scores of an evaluation", limit=Limit.EVALUATION):
                        found = [score(value, wanted[microbatch]) for score in self._scores]
                    totals = [total + one for total, one in zip(totals, found, strict=True)]
                elif self._holder(stage + 1, microbatch) == self._position:
                    kept[stage + 1, microbatch] = value
                else:
                    sending += self._send(forms, stage, self._holder(stage + 1, microbatch), value)
        for _, work in sending:
            work.wait()
        return [total / count for total in totals]

    def _holder(self, stage: int, microbatch: int) -> int:
        holders = self._holders[stage]
        return holders[microbatch % len(holders)]

    def _compute(self, stage: int, microbatch: int, number: int, value: Tree) -> Tree:
        model, layers, device = self._model, self._model.layers, self._model.device
        first = model.world.data.index * model.microbatches
        key = mixed_key(layers.seed, _EVALUATION, number, first + microbatch)
        # None of a step's own microbatches: what the layers note for the next step stays as it is.
        CURRENT_FORWARD.set(CURRENT_FORWARD.step, None)
        with computing_in(model.config.training.precision, device):
            for index in range(model.stages[stage].first_layer, model.stages[stage].end_layer):
                layer = layers[index]
                seed_layer(device, key, index)
                try:
                    with ACTIVITY.doing("an evaluation's forward of layer", index, limit=Limit.EVALUATION):
                        layer.gather()
                        value = layer.module(layer.taken(value))
                        flatten(value)
                except Exception as error:
                    note_layer(error, index, type(layer.module).__name__)
                    note_input(error, index, value)
                    raise
        return value

    def _send(
        self, forms: dict[Link, Boundary], stage: int, target: int, value: Tree
    ) -> list[tuple[torch.Tensor, Any]]:
        link = stage, False, self._position, target
        form, device = Boundary.of(value), self._model.device
        told = b"" if forms.get(link) == form else pickle.dumps(form)
        forms[link] = form
        parts = [torch.tensor([len(told)], device=device)]
        if told:
            parts.append(torch.frombuffer(bytearray(told), dtype=torch.uint8).to(device))
        parts += [wire(tensor.detach().contiguous()) for tensor in tensors_of(value) if tensor.numel() > 0]
        to, group = self._line[target], self._groups[link]
        return [(part, dist.isend(part, dst=to, group=group)) for part in parts]

    def _receive(self, forms: dict[Link, Boundary], stage: int, source: int) -> Tree:
        link, device = (stage - 1, False, source, self._position), self._model.device

        def received(into: torch.Tensor) -> torch.Tensor:
            if into.numel() > 0:
                dist.recv(wire(into), src=self._line[source], group=self._groups[link])
            return into

        told = int(received(torch.zeros(1, dtype=torch.int64, device=device)))
        if told:
            sent = received(torch.empty(told, dtype=torch.uint8, device=device))
            forms[link] = pickle.loads(sent.cpu().numpy().tobytes())
        form = forms[link]
        return unflatten(form.structure, (received(one.empty(device)) for one in form.tensors))


logger = logging.getLogger(__name__)


def _score(name: str, figure: Metric) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A figure of one microbatch as a number, from outputs in full precision."""
    full = in_full_precision(figure)  # type: ignore[arg-type]

    def score(output: torch.Tensor, targets: torch.Tensor) -> float:
        return one_number(full(output, targets), f"{name} of an evaluation")

    return score


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """An evaluation left, alike on all ranks; ``stop``: the job stops now; ``epoch``: the newest plan's."""

    stop: bool
    epoch: int


class Evaluator:
    """The loss on the validation data, if the job has any; ``evaluated_step``: the last, None: not yet."""

    def __init__(self, progress: Progress, plans: PlanFollower, saver: Saver) -> None:
        """Prepare; a plan that is news to ``plans``, and a stop that ``saver`` knows of, interrupt it."""
        self._model, self._run, self._progress = progress.model, progress.run, progress
        self._plans, self._saver = plans, saver
        self.evaluated_step: int | None = None
        self._usual_weight = 1.0

    def due(self) -> bool:
        """True if the step that is done is one of ``evaluation.everySteps``."""
        evaluation, step = self._model.config.evaluation, self._run.step
        return evaluation is not None and step > 0 and step % evaluation.every_steps == 0

    def evaluate(self, *, follow_plans: bool = True) -> Interrupted | None:
        """Measure and print the loss; collective. Returns None, or why it was left and printed nothing."""
        model = self._model
        data, began = model.validation, time.perf_counter()
        if data is None:
            return None
        counts = model.world.gather(data.count)
        if len(set(counts)) > 1:
            raise DataError(
                f"{data.field}: the ranks have {min(counts)} to {max(counts)} batches of it, by len(). "
                "To fix: the same data on every rank"
            )
        metrics = model.definition.metrics
        names = list(metrics)
        forward = ForwardOnly(
            model,
            [_score("loss", self._loss), lambda _, targets: self._weight(targets) - 1.0]
            + [_score(f"metric {name!r}", metric) for name, metric in metrics.items()],
        )
        # The loss, how much the weights differ from the usual one a microbatch, and the metrics.
        totals = [0.0] * (2 + len(names))
        with self._undisturbed():
            for number in range(data.count):
                inputs, targets, digest = self._batch(data, number)
                # Every rank of a column of the mesh has the stage's scores: together they count once.
                scores = forward.run(inputs, targets, number)
                scores = [score / model.world.mesh.column for score in scores]
                news = float(self._plans.newest_epoch()) if follow_plans else 0.0
                # In each batch, so that no rank is far ahead of the others.
                votes, told = float(self._saver.stop_votes()), compared(digest)
                summed = model.world.sum_rows({"told": [votes, news], "targets": told, "scores": scores})
                what = f"batch {number + 1} of an evaluation"
                refuse_other_targets(summed["targets"], field=data.field, what=what)
                totals = [total + score for total, score in zip(totals, summed["scores"], strict=True)]
                votes, epoch = summed["told"]
                stop = votes >= model.world.size
                if stop or self._plans.is_news(round(epoch)):
                    return Interrupted(stop=stop, epoch=round(epoch))
        loss, apart, *others = totals
        batches = data.count + apart
        means = [self._finite("validation loss", loss / batches if batches > 0 else math.nan)] + [
            self._finite(f"validation {name}", total / data.count)
            for name, total in zip(names, others, strict=True)
        ]
        self.evaluated_step = self._run.step
        self._progress.evaluated(means[0])
        pause_ms = (time.perf_counter() - began) * 1000
        fields = {"metrics": dict(zip(names, means[1:], strict=True))} if names else {}
        self._progress.event(
            "evaluation", validation_loss=means[0], batches=data.count, pause_ms=pause_ms, **fields
        )
        return None

    def _finite(self, name: str, mean: float) -> float | None:
        if math.isfinite(mean):
            return mean
        logger.warning("the %s of step %d is %s", name, self._run.step, mean)
        return None

    def _loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return weighted(self._model.definition.loss(output, targets), output, self._weight(targets))

    def _weight(self, targets: torch.Tensor) -> float:
        # Exactly 1 where all microbatches weigh the same.
        return weights_of(self._model.definition.loss_weight, targets, 1)[0] / self._usual_weight

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        modules = [layer.module for layer in self._model.layers]
        running = CURRENT_FORWARD.step, CURRENT_FORWARD.microbatch
        try:
            with (
                evaluating(modules, self._model.device),
                in_place_of_loss(self._model.definition.loss),
            ):
                yield
        except Exception as error:
            error.add_note(EVALUATION_NOTE)
            raise
        finally:
            CURRENT_FORWARD.set(*running)

    def _batch(self, data: ValidationData, number: int) -> Any:
        if not self._model.is_an_end:
            return None, None, None
        size = self._model.config.pipeline.global_batch_size
        what = f"batch {number + 1} of an evaluation"
        with ACTIVITY.doing(what, limit=Limit.EVALUATION):
            batch = read_batch(
                data.batch, data.seed, number, size, field=data.field, name=data.name, what=what
            )
        if number == 0:
            count = self._model.config.pipeline.microbatches
            # Of the whole batch, so that all replicas have the same.
            self._usual_weight = (
                sum(weights_of(self._model.definition.loss_weight, batch[1], count)) / count or 1.0
            )
        return *own_part(batch, self._model.world, self._model.device), targets_digest(batch[1])
