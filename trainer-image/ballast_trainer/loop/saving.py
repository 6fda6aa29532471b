"""Saving and resuming of a job's state, and its export; a failed checkpoint does not end the training."""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from ballast_policies.contract.job.output import AsyncMode
from ballast_policies.contract.messages import ExitReason
from ballast_policies.prices.hazard import steps_between_checkpoints

from ballast_trainer.causes import describe
from ballast_trainer.checkpoints import tensors
from ballast_trainer.checkpoints.checkpoints import Checkpoints
from ballast_trainer.checkpoints.export import check_place, export_checkpoint
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.checkpoints.memory_copies import MemoryCopies, Moment
from ballast_trainer.checkpoints.staging import BesideSteps, Flight
from ballast_trainer.distributed.connections import CONNECTIONS
from ballast_trainer.distributed.process_group import World
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.errors import CheckpointError, CheckpointNotWritten, PeerLost, Stopped
from ballast_trainer.loop.progress import Progress, SessionOutcome
from ballast_trainer.loop.state import ModelState
from ballast_trainer.models.ties import as_text
from ballast_trainer.pipeline.layout import is_asynchronous
from ballast_trainer.profiling.stopwatch import Stopwatch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class _InFlight:
    """The checkpoint that is being written beside the steps.

    Attributes:
        step: its steps.
        flight: the copy of the state, and the milliseconds until the checkpoint was whole.
        pause_ms: how long model has stood still for it.
    """

    step: int
    flight: Flight[float]
    pause_ms: float


_RETRIES_PER_PERIOD = 10
"""A failed checkpoint is tried again after this part of ``checkpoint.everySteps``."""


class Saver:
    """Saves and resumes the job; without ``checkpoint.path`` or copies in memory it does neither."""

    def __init__(self, progress: Progress, *, stop: StopSignal, memory: MemoryCopies | None = None) -> None:
        """Prepare; ``progress`` prints what was written, and what was not; ``memory``: None: no copies."""
        self._model, self._run, self._progress = progress.model, progress.run, progress
        model = progress.model
        self._stop, self._memory = stop, memory
        self._seconds: deque[float] = deque(maxlen=5)
        self._write_seconds: deque[float] = deque(maxlen=5)
        self._longest_write = 0.0
        self._in_flight: _InFlight | None = None
        self._beside = BesideSteps[float](model.device, "checkpoint")
        self._room_for: tuple[int, ...] = ()
        self._slow = False
        self._step_seconds: float | None = None
        # Without a flush the weights depend on where the pipeline drains, so that must not be measured.
        self._chosen = model.config.checkpoint.every_steps is None and not is_asynchronous(
            model.config.pipeline.schedule
        )
        self._checkpoints: Checkpoints | None = None
        self._begun = False
        config = model.config

        def check() -> None:
            if stop.received and not self._begun:
                raise Stopped("told to stop before the first step; nothing to save")

        self._job = Manifest(
            step=0,
            layer_count=model.definition.layer_count,
            seed=config.training.seed,
            files={},
            optimizer=config.training.optimizer,
            tied=tuple(map(as_text, model.definition.tied)),
        )
        if config.checkpoint.path is not None:
            self._checkpoints = Checkpoints(
                config.checkpoint.path,
                keep=config.checkpoint.keep,
                job=self._job,
                start_over=config.checkpoint.start_over,
                retry_seconds=config.checkpoint.retry_seconds,
                check=check,
            )

    def resume(self) -> Manifest | None:
        """Take over the step of the newest checkpoint; None where there is none. Collective.

        After a loss of ranks: of the copies in memory, if all layers are among them.

        Raises:
            CheckpointError: there are some, and none can be used; it is of another job; another run holds the
                directory.
        """
        model, manifest = self._model, None
        source = None if self._memory is None else self._memory.source
        if self._checkpoints is not None:
            self._checkpoints.open(model.world, launch=self._run.plan.launch)
        if source is not None:
            manifest, checkpoint_step = source.moment.manifest, source.moment.checkpoint_step
            self._progress.continue_timing(source.moment.began, source.moment.trained_seconds)
        elif self._checkpoints is not None:
            manifest = self._checkpoints.newest(model.world)
            checkpoint_step = None if manifest is None else manifest.step
        if manifest is not None:
            self._run.continue_from(manifest.step, manifest.loss_scale, checkpoint_step)
            model.batches.continue_from(manifest.step, manifest.data)
            self._progress.resumed_from_step = manifest.step
        return manifest

    def _manifest(self, *, data: bool) -> Manifest:
        """Manifest of the step that is done; ``data``: with where the data's loader is."""
        step = self._run.step
        return dataclasses.replace(
            self._job,
            step=step,
            loss_scale=self._run.loss_scale.state,
            data=self._model.batches.position(step) if data else "",
        )

    def load(self, manifest: Manifest) -> None:
        """Load the layers held; collective. Raises CheckpointError: they do not fit, or cannot be read."""
        if self._memory is not None and self._memory.source is not None:
            self._memory.load(self._model.world, self._model.layers)
        elif self._checkpoints is not None:
            self._checkpoints.load(self._model.world, self._model.layers, manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the directory to other runs; a checkpoint that is being written is completed first."""
        CONNECTIONS.stay_if_left_behind()
        if self._memory is not None and isinstance(error, PeerLost):
            # Whoever waits for this rank is to notice, too, and no thread is to be left behind.
            CONNECTIONS.shut()
            self._memory.abandon()
            if self._in_flight is not None:
                wait([self._in_flight.flight.result])
        if self._in_flight is not None and isinstance(error, Exception) and not isinstance(error, PeerLost):
            # The others' parts are written as well: they wait for this rank.
            wait([self._in_flight.flight.result])
        self.close()

    def close(self) -> None:
        """Release the directory to other runs."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def stop_votes(self) -> int:
        """This rank's, for the end of the job; a step and a save may pass until its state is saved."""
        save = self._longest_write * (1 if self._in_flight is None else 2)
        seconds = save + max(self._progress.step_seconds(), default=0.0)
        return self._stop.votes(self._model.world.rank, self._model.world.size, seconds)

    @property
    def written(self) -> bool:
        """True if no checkpoint is being written by this rank."""
        return self._in_flight is None or self._in_flight.flight.result.done()

    def wait_for_copy(self) -> None:
        """Wait until the state is copied that the step is about to change."""
        if self._in_flight is not None:
            watch = Stopwatch()
            self._in_flight.flight.copy.wait()
            self._in_flight.pause_ms += watch.milliseconds()
        self._settle_copies()

    def copy_if_due(self, *, anew: bool) -> None:
        """Copy the state to the next rank's memory beside steps; collective. ``anew``: none has a copy."""
        model, memory = self._model, self._memory
        if memory is None or not (anew or self._run.step % memory.every_steps == 0):
            return
        began, trained_seconds = self._progress.timing()
        moment = Moment(
            manifest=self._manifest(data=True),
            checkpoint_step=self._run.checkpoint_step,
            began=began,
            trained_seconds=trained_seconds,
        )
        copied = memory.begin(model.world, self._run.plan, model.layers, moment, at_once=bool(model.dynamics))
        if not copied and anew and model.world.rank == 0:
            logger.warning(
                "%d ranks are too few for copies in each other's memory: checkpoints alone count",
                model.world.size,
            )

    def _settle_copies(self) -> None:
        if self._memory is None:
            return
        try:
            self._memory.settle()
        except CheckpointNotWritten as error:
            if self._model.world.rank == 0:
                logger.warning("the ranks keep the copies of before: %s", error)

    def every_steps(self) -> int | None:
        """Steps between two checkpoints now, as rank 0 knows them; None: nothing is saved.

        Where ``checkpoint.everySteps`` is not stated and machines may be taken away, by Daly's formula with
        what a checkpoint and a step take.
        """
        model, seconds = self._model, self._progress.step_seconds()
        if self._checkpoints is None:
            return None
        plan = self._run.plan if self._progress.channel is None else self._progress.channel.plan()
        if not self._chosen or not plan.failures_per_hour or not self._seconds:
            return model.config.checkpoint.steps
        if seconds:  # after a change of shape none is measured for a while
            self._step_seconds = max(median(seconds), 1e-6)
        if self._step_seconds is None:
            return model.config.checkpoint.steps
        return steps_between_checkpoints(
            checkpoint_seconds=max(median(self._seconds), 1e-3),
            step_seconds=self._step_seconds,
            failures_per_hour=plan.failures_per_hour,
        )

    def wanted(self) -> bool:
        """True if rank 0 wants a checkpoint after the step in progress; told to the others with its sum."""
        model = self._model
        if model.world.rank != 0 or not self._chosen or self._run.save_again_at is not None:
            return False
        if self._in_flight is not None:
            return False
        every = self.every_steps()
        return every is not None and self._run.step + 1 - (self._run.checkpoint_step or 0) >= every

    def save_if_due(self, *, wanted: bool) -> bool:
        """Save where ``checkpoint.everySteps`` asks, or some steps after a checkpoint failed; collective.

        Beside the steps that follow, unless ``checkpoint.asyncMode`` is disabled. ``wanted``: rank 0 wants
        it, where no steps are stated. Returns whether it was due.
        """
        step, again_at = self._run.step, self._run.save_again_at
        again = again_at is not None and step >= again_at
        stated = not self._chosen and step % self._model.config.checkpoint.steps == 0
        due = stated or wanted or again
        if due and self._model.config.checkpoint.async_mode is AsyncMode.ASYNC:
            self._begin()
        elif due:
            self.save()
        else:
            self._make_room()
        return due

    def _make_room(self) -> None:
        """Have memory for the copy before a checkpoint is due, for other layers than those before."""
        layers = self._model.layers
        if (
            self._checkpoints is None
            or self._model.config.checkpoint.async_mode is not AsyncMode.ASYNC
            or self._in_flight is not None
            or self._room_for == layers.indices()
            # To look at its state would be to wait for it.
            or any(layer.arrives for layer in layers)
        ):
            return
        self._room_for = layers.indices()
        self._beside.make_room(self._model.world, layers)

    def _begin(self) -> None:
        """Write the state beside the steps that follow, after the checkpoint before; collective."""
        model, before = self._model, self._in_flight
        if before is not None and not self.written and not self._slow and model.world.rank == 0:
            self._slow = True
            logger.warning(
                "step %d waits for the checkpoint of step %d, which is still being written. "
                "To fix, where steps often wait: a larger checkpoint.everySteps, or faster storage",
                self._run.step,
                before.step,
            )
        self.settle()
        checkpoints = self._checkpoints
        if checkpoints is None or self._run.checkpoint_step == self._run.step:
            return
        watch, self._begun = Stopwatch(), True
        manifest = self._manifest(data=model.world.rank == 0)

        def write(world: World, state: Mapping[str, torch.Tensor]) -> float:
            checkpoints.save(world, state, manifest)
            return watch.milliseconds()

        # Changes of the model, and updates without a flush, may come at any time.
        at_once = bool(model.dynamics) or is_asynchronous(model.config.pipeline.schedule)
        flight = self._beside.begin(model.world, model.layers, write, at_once=at_once)
        self._in_flight = _InFlight(step=self._run.step, flight=flight, pause_ms=watch.milliseconds())

    def settle_all(self) -> None:
        """Wait for all that this process group has to write; collective."""
        self.settle()
        self._settle_copies()

    def settle(self) -> bool:
        """Wait for the checkpoint that is being written, and tell of it; whether there was one. Collective.

        Raises:
            CheckpointError: another run has taken over the directory.
        """
        saving = self._in_flight
        if saving is None:
            return False
        watch = Stopwatch()
        saving.flight.copy.wait()
        try:
            write_ms, failure = saving.flight.result.result(), None
        except CheckpointNotWritten as error:
            write_ms, failure = 0.0, error
        finally:
            self._in_flight = None
        saving.pause_ms += watch.milliseconds()
        if failure is not None:
            self._failed(saving.step, failure, saving.pause_ms)
        else:
            self._saved(saving.step, saving.pause_ms, write_ms)
        return True

    def save(self) -> str:
        """Save the state, unless it is saved, while all ranks wait; collective. Reports the result as text.

        Raises:
            CheckpointError: another run has taken over the directory.
        """
        model = self._model
        if self._checkpoints is None:
            return "no checkpoint.path, nothing is saved"
        self.settle()
        if self._run.checkpoint_step == self._run.step:
            return "the state is saved"
        watch, self._begun = Stopwatch(), True
        try:
            state = tensors.stored(model.world, model.layers)
            self._checkpoints.save(model.world, state, self._manifest(data=model.world.rank == 0))
        except CheckpointNotWritten as error:
            return self._failed(self._run.step, error, watch.milliseconds())
        pause_ms = watch.milliseconds()
        self._saved(self._run.step, pause_ms, pause_ms)
        return "the state is saved"

    def _saved(self, step: int, pause_ms: float, write_ms: float) -> None:
        assert self._checkpoints is not None
        self._longest_write = max(self._longest_write, write_ms / 1000)
        self._run.save_again_at = None
        self._run.checkpoint_step = step
        self._seconds.append(pause_ms / 1000)
        self._write_seconds.append(write_ms / 1000)
        self._progress.saved(
            median(self._seconds), self.every_steps(), write_seconds=median(self._write_seconds)
        )
        path = self._checkpoints.path_of(step)
        self._progress.event("checkpoint", step=step, path=path, pause_ms=pause_ms, write_ms=write_ms)

    def _failed(self, step: int, error: CheckpointNotWritten, pause_ms: float) -> str:
        model = self._model
        assert self._checkpoints is not None
        every = model.config.checkpoint.steps
        self._run.save_again_at = self._run.step + max(1, every // _RETRIES_PER_PERIOD)
        # Those of before may have vanished with their folder.
        newest = self._checkpoints.newest_left(model.world, self._run.checkpoint_step)
        self._run.checkpoint_step = newest
        text = f"the newest checkpoint is that of step {newest}" if newest is not None else "there is none"
        why = f"step {step} is not saved, {text}: {error}"
        if model.world.rank == 0:
            logger.warning(why)
        self._progress.not_saved(why)
        self._progress.event(
            "checkpointFailed", step=step, reason=str(error), newest=newest, pause_ms=pause_ms
        )
        return f"the state is not saved, {text}: {error}"

    def save_and_stop(self, why: str) -> SessionOutcome:
        """Save, and end this rank's part; collective. The outcome tells whether the state is saved."""
        text = self.save()
        saved = self._run.checkpoint_step == self._run.step
        reason = ExitReason.STOPPED if saved else ExitReason.STOPPED_UNSAVED
        return self._progress.ended(reason, f"{why}; {text}")

    def save_last(self) -> None:
        """Save the state after the last step: a job whose result is lost has not finished. Collective.

        Raises:
            CheckpointNotWritten: storage refuses for longer than ``checkpoint.retrySeconds``.
        """
        text, waited, pause = self.save(), 0.0, 0.25
        while self._checkpoints is not None and self._run.checkpoint_step != self._run.step:
            # Counted, not measured: all ranks must stop at the same attempt.
            if waited >= self._model.config.checkpoint.retry_seconds:
                raise CheckpointNotWritten(text)
            time.sleep(pause)
            waited += pause
            pause = min(2 * pause, 10.0)
            text = self.save()


def check_export_place(model: ModelState) -> None:
    """Try the place of the job's ``export`` before the first step, by rank 0; collective.

    Raises:
        CheckpointError: on all ranks; the model could not be written there.
    """
    wanted = model.config.export
    if wanted is None:
        return
    _by_rank_0(model.world, lambda: check_place(wanted), "export.path")


def export_at_end(progress: Progress) -> None:
    """Write the model that the job's ``export`` asks for, by rank 0, from the last checkpoint; collective.

    Raises:
        CheckpointError: on all ranks; it could not be written.
    """
    model = progress.model
    wanted, folder = model.config.export, model.config.checkpoint.path
    if wanted is None:
        return
    assert folder is not None, "the contract refuses it"
    watch = Stopwatch()

    def export() -> int:
        _, count = export_checkpoint(
            model.config,
            model.definition,
            Path(folder),
            Path(wanted.path),
            wanted.format,
            retry_seconds=model.config.checkpoint.retry_seconds,
        )
        return count

    count = _by_rank_0(model.world, export, "all steps are done and saved, but the model is not exported")
    progress.event("export", path=wanted.path, tensors=count, pause_ms=watch.milliseconds())


def _by_rank_0(world: World, work: Callable[[], Any], what: str) -> Any:
    """Rank 0's ``work``, on every rank; collective. Raises CheckpointError on all: ``what``, the error."""
    found, failure = None, None
    if world.rank == 0:
        try:
            found = work()
        except Exception as error:
            failure = describe(error)
    found, failure = world.from_rank_0((found, failure), patient=True)
    if failure is not None:
        raise CheckpointError(f"{what}: {failure}")
    return found
