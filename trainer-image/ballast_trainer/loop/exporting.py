"""Export of a job's whole model from its checkpoint."""

from collections.abc import Callable
from pathlib import Path

from ballast_policies.contract.job import ExportFormat, JobConfig

from ballast_trainer.causes import describe
from ballast_trainer.checkpoints.export import newest_sound, whole_model, write_model
from ballast_trainer.checkpoints.manifest import Patience
from ballast_trainer.dynamics.registry import build_dynamics
from ballast_trainer.errors import CheckpointError
from ballast_trainer.loop.state import Stopwatch, TrainingState
from ballast_trainer.models.protocol import Model


def export_checkpoint(
    config: JobConfig,
    model: Model,
    folder: Path,
    output: Path,
    kind: ExportFormat,
    *,
    retry_seconds: float = 0.0,
) -> tuple[int, int]:
    """Write the newest whole checkpoint of a directory as one model.

    Args:
        config: the job's.
        model: of it.
        folder: its checkpoints, or one of them.
        output: file, or folder of Hugging Face's.
        kind: the format.
        retry_seconds: how long to try again what storage does not give.

    Returns:
        The checkpoint's step, and how many tensors were written.

    Raises:
        CheckpointError: there is none, it is of another model, or storage refuses the file.
        ConfigurationError: the model cannot be written in this format.
    """
    patience = Patience(retry_seconds)
    try:
        path, manifest = newest_sound(folder, patience)
        dynamics = build_dynamics(config.dynamics, model.layer_count, model.family)
        found = whole_model(path, manifest, model, dynamics, config.training)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. To fix: the storage") from error
    write_model(found, output, kind, model)
    return manifest.step, len(found)


def export_at_end(training: TrainingState, event: Callable[..., None]) -> None:
    """Write the model that the job's ``export`` asks for, by rank 0, from the last checkpoint; collective.

    Raises:
        CheckpointError: on all ranks; it could not be written.
    """
    wanted, folder = training.config.export, training.config.checkpoint.path
    if wanted is None:
        return
    assert folder is not None, "the contract refuses it"
    watch, failure, count = Stopwatch(), None, 0
    if training.world.rank == 0:
        try:
            _, count = export_checkpoint(
                training.config,
                training.model,
                Path(folder),
                Path(wanted.path),
                wanted.format,
                retry_seconds=training.config.checkpoint.retry_seconds,
            )
        except Exception as error:
            failure = describe(error)
    failure = training.world.from_rank_0(failure, patient=True)
    if failure is not None:
        raise CheckpointError(f"all steps are done and saved, but the model is not exported: {failure}")
    event("export", path=wanted.path, tensors=count, pause_ms=watch.milliseconds())
