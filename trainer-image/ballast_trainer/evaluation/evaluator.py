"""The loss on validation data, measured between two steps; training continues as if there had been none."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from ballast_policies.contract import Stage
from ballast_policies.contract.job import JobConfig

from ballast_trainer.causes import EVALUATION_NOTE
from ballast_trainer.data.sources import read_batch
from ballast_trainer.distributed.process_group import World
from ballast_trainer.errors import TrainerError
from ballast_trainer.evaluation.forward_only import ForwardOnly
from ballast_trainer.evaluation.validation_data import ValidationData
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.precision import in_full_precision
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.layers.undisturbed import evaluating
from ballast_trainer.models.loss_weights import weighted, weights_of
from ballast_trainer.models.protocol import Metric, Model
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


class EvaluatedJob(Protocol):
    """What an evaluation reads of the running job; see ``ballast_trainer.loop.state.TrainingState``."""

    config: JobConfig
    model: Model
    device: torch.device
    layers: LayerSet
    world: World
    stages: tuple[Stage, ...]
    validation: ValidationData | None
    step: int

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """By stage, the pipeline positions that hold it."""

    @property
    def microbatches(self) -> int:
        """Of a step on each replica of the pipeline."""


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
        training: EvaluatedJob,
        *,
        measured: Callable[[float | None], None],
        event: Callable[..., None],
        stop_votes: Callable[[], int],
        newest_epoch: Callable[[], int],
        is_news: Callable[[int], bool],
    ) -> None:
        """Prepare.

        Args:
            training: the job.
            measured: receives the loss; None where it is not finite.
            event: prints it.
            stop_votes: of this rank for the end of the job; see ``StopSignal.votes``.
            newest_epoch: of the plan that rank 0 has seen; 0 on other ranks.
            is_news: whether the plan of an epoch has yet to be followed.
        """
        self._training, self._measured, self._event = training, measured, event
        self._stop_votes, self._newest_epoch, self._is_news = stop_votes, newest_epoch, is_news
        self.evaluated_step: int | None = None
        self._usual_weight = 1.0

    def due(self) -> bool:
        """Whether the step that is done is one of ``evaluation.everySteps``."""
        evaluation, step = self._training.config.evaluation, self._training.step
        return evaluation is not None and step > 0 and step % evaluation.every_steps == 0

    def evaluate(self, *, follow_plans: bool = True) -> Interrupted | None:
        """Measure and print the loss; collective over the world.

        Args:
            follow_plans: whether a new plan interrupts it.

        Returns:
            None, or what it was left for: nothing has been printed then.
        """
        training = self._training
        data, began = training.validation, time.perf_counter()
        if data is None:
            return None
        forward = self._forward()
        groups = forward.groups()
        names = list(training.model.metrics)
        # The loss, how much the weights differ from the usual one a microbatch, and the metrics.
        totals = [0.0] * (2 + len(names))
        with self._undisturbed():
            for number in range(data.count):
                inputs, targets = self._batch(forward, data, number)
                # Every rank of a column of the mesh has the stage's scores: together they count once.
                scores = forward.run(inputs, targets, groups, number)
                scores = [score / training.world.mesh.column for score in scores]
                news = float(self._newest_epoch()) if follow_plans else 0.0
                # In each batch, so that no rank is far ahead of the others.
                votes, epoch, *scores = training.world.sum([float(self._stop_votes()), news, *scores])
                totals = [total + score for total, score in zip(totals, scores, strict=True)]
                stop = votes >= training.world.size
                if stop or self._is_news(round(epoch)):
                    return Interrupted(stop=stop, epoch=round(epoch))
        loss, apart, *others = totals
        batches = data.count + apart
        means = [self._finite("validation loss", loss / batches if batches > 0 else math.nan)] + [
            self._finite(f"validation {name}", total / data.count)
            for name, total in zip(names, others, strict=True)
        ]
        self.evaluated_step = training.step
        self._measured(means[0])
        pause_ms = (time.perf_counter() - began) * 1000
        fields = {"metrics": dict(zip(names, means[1:], strict=True))} if names else {}
        self._event("evaluation", validation_loss=means[0], batches=data.count, pause_ms=pause_ms, **fields)
        return None

    def _finite(self, name: str, mean: float) -> float | None:
        if math.isfinite(mean):
            return mean
        logger.warning("the %s of step %d is %s", name, self._training.step, mean)
        return None

    def _forward(self) -> ForwardOnly:
        training = self._training
        world = training.world
        return ForwardOnly(
            stages=training.stages,
            holders=training.holders,
            position=world.position,
            line=world.pipeline.ranks,
            lines=world.mesh.lines("position", world.size),
            layers=training.layers,
            microbatches=training.microbatches,
            first_microbatch=world.data.index * training.microbatches,
            scores=[_score("loss", self._loss), lambda _, targets: self._weight(targets) - 1.0]
            + [_score(f"metric {name!r}", metric) for name, metric in training.model.metrics.items()],
            precision=training.config.training.precision,
        )

    def _loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return weighted(self._training.model.loss(output, targets), output, self._weight(targets))

    def _weight(self, targets: torch.Tensor) -> float:
        # Exactly 1 where all microbatches weigh the same.
        return weights_of(self._training.model.loss_weight, targets, 1)[0] / self._usual_weight

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        modules = [layer.module for layer in self._training.layers]
        running = CURRENT_FORWARD.step, CURRENT_FORWARD.microbatch
        try:
            with evaluating(modules, self._training.device):
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
        size, world = self._training.config.pipeline.global_batch_size, self._training.world
        inputs, targets = read_batch(
            data.batch,
            data.seed,
            number,
            size,
            field=data.field,
            name=data.name,
            what=f"batch {number + 1} of an evaluation",
        )
        if number == 0:
            count = self._training.config.pipeline.microbatches
            # Of the whole batch, so that all replicas have the same.
            self._usual_weight = (
                sum(weights_of(self._training.model.loss_weight, targets, count)) / count or 1.0
            )
        share = size // world.data.size
        mine = slice(world.data.index * share, (world.data.index + 1) * share)
        device = self._training.device
        return inputs[mine].to(device), targets[mine].to(device)
