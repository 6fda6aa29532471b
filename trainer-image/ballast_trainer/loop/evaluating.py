"""The loss on validation data, measured between two steps; training continues as if there had been none."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ballast_trainer.causes import EVALUATION_NOTE
from ballast_trainer.data.sources import read_batch
from ballast_trainer.errors import TrainerError
from ballast_trainer.evaluation.forward_only import ForwardOnly
from ballast_trainer.evaluation.validation_data import ValidationData
from ballast_trainer.layers.buffers import evaluating
from ballast_trainer.layers.precision import in_full_precision
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.loop.batches import own_part
from ballast_trainer.loop.plan_following import PlanFollower
from ballast_trainer.loop.progress import Progress
from ballast_trainer.loop.saving import Saver
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.models.loss_weights import weighted, weights_of
from ballast_trainer.models.protocol import Metric
from ballast_trainer.tensor_parallel.parallel_pair import pairs

logger = logging.getLogger(__name__)


def _score(name: str, figure: Metric) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A figure of one microbatch as a number, from outputs in full precision."""
    full = in_full_precision(figure)  # type: ignore[arg-type]

    def score(output: torch.Tensor, targets: torch.Tensor) -> float:
        found = full(output, targets)
        if isinstance(found, torch.Tensor) and found.numel() != 1:
            raise TrainerError(
                f"the {name} of an evaluation is a tensor of shape {list(found.shape)}. "
                "To fix: return one number, the mean of the microbatch"
            )
        return float(found)

    return score


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """An evaluation that was left, the same on every rank.

    Attributes:
        stop: the job has to stop now.
        epoch: of the newest plan.
    """

    stop: bool
    epoch: int


class Evaluator:
    """Measures the loss on the validation data; without ``evaluation`` it does nothing.

    Attributes:
        evaluated_step: the step after which it did last; None: not yet.
    """

    def __init__(
        self,
        model: ModelState,
        run: RunState,
        progress: Progress,
        plans: PlanFollower,
        saver: Saver,
    ) -> None:
        """Prepare; a plan that is news to ``plans``, and a stop that ``saver`` knows of, interrupt it."""
        self._model, self._run, self._progress = model, run, progress
        self._plans, self._saver = plans, saver
        self.evaluated_step: int | None = None
        self._usual_weight = 1.0

    def due(self) -> bool:
        """Whether the step that is done is one of ``evaluation.everySteps``."""
        evaluation, step = self._model.config.evaluation, self._run.step
        return evaluation is not None and step > 0 and step % evaluation.every_steps == 0

    def evaluate(self, *, follow_plans: bool = True) -> Interrupted | None:
        """Measure and print the loss; collective over the world.

        Args:
            follow_plans: whether a new plan interrupts it.

        Returns:
            None, or what it was left for: nothing has been printed then.
        """
        model = self._model
        data, began = model.validation, time.perf_counter()
        if data is None:
            return None
        forward = self._forward()
        groups = forward.groups()
        names = list(model.definition.metrics)
        # The loss, how much the weights differ from the usual one a microbatch, and the metrics.
        totals = [0.0] * (2 + len(names))
        with self._undisturbed():
            for number in range(data.count):
                inputs, targets = self._batch(forward, data, number)
                # Every rank of a column of the mesh has the stage's scores: together they count once.
                scores = forward.run(inputs, targets, groups, number)
                scores = [score / model.world.mesh.column for score in scores]
                news = float(self._plans.newest_epoch()) if follow_plans else 0.0
                # In each batch, so that no rank is far ahead of the others.
                votes, epoch, *scores = model.world.sum([float(self._saver.stop_votes()), news, *scores])
                totals = [total + score for total, score in zip(totals, scores, strict=True)]
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

    def _forward(self) -> ForwardOnly:
        model = self._model
        world = model.world
        return ForwardOnly(
            stages=model.stages,
            holders=model.holders,
            position=world.position,
            line=world.pipeline.ranks,
            lines=world.mesh.lines("position", world.size),
            layers=model.layers,
            microbatches=model.microbatches,
            first_microbatch=world.data.index * model.microbatches,
            scores=[_score("loss", self._loss), lambda _, targets: self._weight(targets) - 1.0]
            + [_score(f"metric {name!r}", metric) for name, metric in model.definition.metrics.items()],
            precision=model.config.training.precision,
        )

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
            with evaluating(modules, self._model.device):
                for pair in pairs(modules):
                    # All columns, each by its own rank, whatever the last step has left out or handed over.
                    pair.selections, pair.handed_over, pair.helped = {}, 0, ()
                yield
        except Exception as error:
            error.add_note(EVALUATION_NOTE)
            raise
        finally:
            CURRENT_FORWARD.set(*running)

    def _batch(self, forward: ForwardOnly, data: ValidationData, number: int) -> Any:
        if not forward.reads_data:
            return None, None
        size = self._model.config.pipeline.global_batch_size
        batch = read_batch(
            data.batch,
            data.seed,
            number,
            size,
            field=data.field,
            name=data.name,
            what=f"batch {number + 1} of an evaluation",
        )
        if number == 0:
            count = self._model.config.pipeline.microbatches
            # Of the whole batch, so that all replicas have the same.
            self._usual_weight = (
                sum(weights_of(self._model.definition.loss_weight, batch[1], count)) / count or 1.0
            )
        return own_part(batch, self._model.world, self._model.device)
