"""The checkpoints of a job: atomic writes, reads verified by all ranks.

A checkpoint is a directory ``step-00000040`` of DCP files and a ``manifest.json`` with the
checksum of each file.  It is written under a temporary name and renamed when complete.  A tensor's
key names its layer, so any number of ranks can load it.  A checkpoint that cannot be used is renamed,
never removed.
"""

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ballast_trainer.checkpoints import tensors
from ballast_trainer.checkpoints.folder import CheckpointFolder, name_of
from ballast_trainer.checkpoints.folder_lock import FolderLock, Owner
from ballast_trainer.checkpoints.manifest import Flaw, Manifest, Patience, checksum, flaws, read_manifest
from ballast_trainer.distributed.process_group import World
from ballast_trainer.errors import CheckpointError, CheckpointNotWritten
from ballast_trainer.layers.layer import LayerSet

logger = logging.getLogger(__name__)

_REPAIR = "To fix: the storage; then start again"


class Checkpoints:
    """The checkpoints of a job in a directory that all of its ranks share."""

    def __init__(
        self,
        path: str,
        *,
        keep: int,
        job: Manifest,
        start_over: bool = False,
        retry_seconds: float = 0.0,
        check: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare to keep so many whole ones in the directory ``path``.

        ``job``: what a checkpoint of this job says of its model, seed and optimizer.  With ``start_over`` it
        starts from step 0 where there are checkpoints and none can be used.  A failed read is tried again for
        ``retry_seconds``, in which ``check`` may raise.
        """
        self._path = Path(path)
        self._job = job
        self._start_over, self._retry_seconds = start_over, retry_seconds
        self._check, self._sleep = check, sleep
        self._folder = CheckpointFolder(self._path, keep=keep, patience=self._patience)
        self._lock: FolderLock | None = None
        self._mark = ""

    def open(self, world: World, *, launch: int = 1) -> None:
        """Create the directory if necessary and lock it, so that a wrong one is found before the first step.

        Collective over the world.

        Raises:
            CheckpointError: rank 0 cannot write there, or another run does.
        """
        failure = None
        if world.rank == 0:
            try:
                self._path.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(
                    self._path, Owner.this_process(launch), check=self._check, sleep=self._sleep
                )
                self._lock.acquire()
                self._mark = self._lock.token[:8]
                self._folder.remove_partial()
            except (OSError, ValueError) as error:
                failure = _cannot_write(self._path, error)
            except CheckpointError as error:
                failure = str(error)
        failure, self._mark = world.from_rank_0((failure, self._mark), patient=True)
        if failure is not None:
            raise CheckpointError(failure)

    def path_of(self, step: int) -> str:
        """The directory of the checkpoint of a step."""
        return str(self._path / name_of(step))

    def newest_left(self, world: World, step: int | None) -> int | None:
        """``step``, or an older one where its checkpoint is gone; collective."""
        left: int | None = world.from_rank_0(self._folder.newest_left(step) if world.rank == 0 else None)
        return left

    def close(self) -> None:
        """Release the lock on the directory."""
        if self._lock is not None:
            self._lock.release()

    def save(self, world: World, state: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
        """Save a state, by key as of :func:`tensors.stored`; collective over the world.

        Raises:
            CheckpointNotWritten: storage refuses; its partial files are removed, earlier checkpoints are
                unchanged.
            CheckpointError: another run has taken over the directory.
        """
        final = self._path / name_of(manifest.step)
        temporary = self._path / f".{final.name}{self._mark and '.' + self._mark}.partial"
        written, failure = False, None
        if world.rank == 0:
            try:
                written = self._folder.make_room(final, self._lock)
                if not written:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir(parents=True)
            except OSError as error:
                failure = _cannot_write(temporary, error)
        # The name, too: a rank that has joined the running job does not know the lock's mark.
        written, failure, name = world.from_rank_0((written, failure, temporary.name), patient=True)
        temporary = self._path / name
        if written:
            return
        if failure is None:
            reason = tensors.save(world, state, temporary)
            failure = None if reason is None else _cannot_write(temporary, reason)
        if failure is None:
            failure = self._complete(world, temporary, final, manifest)
        if failure is not None:
            # Partial files would keep a full disk full.
            if world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointNotWritten(failure)

    def _complete(self, world: World, temporary: Path, final: Path, manifest: Manifest) -> str | None:
        """Verify the written files and rename them into place; on all ranks, the reason of a failure."""
        # Every rank reads back its own files, at the same time as the others.
        read: dict[str, int] = {}
        failure = None
        try:
            read = {path.name: checksum(path) for path in temporary.glob(f"__{world.rank}_*")}
        except OSError as error:
            failure = _cannot_write(temporary, error)
        found = world.gather((read, failure), patient=True)
        failure = next((failed for _, failed in found if failed is not None), None)
        if world.rank == 0 and failure is None:
            checksums = {name: crc for files, _ in found for name, crc in files.items()}
            manifest = dataclasses.replace(manifest, files=checksums)
            failure = self._put_in_place(temporary, final, manifest)
        taken = world.rank == 0 and self._folder.is_taken(self._lock)
        reason: str | None
        reason, taken = world.from_rank_0((failure, taken), patient=True)
        if taken:
            if world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"another run has taken over {self._path}: this one did not answer for too long. "
                "To fix: end one of them, or give it a checkpoint.path of its own"
            )
        return reason

    def _put_in_place(self, temporary: Path, final: Path, manifest: Manifest) -> str | None:
        if self._folder.is_taken(self._lock):
            return None
        missing = sorted(name for name in manifest.files if not (temporary / name).exists())
        if missing:
            return (
                f"{', '.join(missing)}: written by other ranks, not found in {temporary} by rank 0. "
                "To fix: a checkpoint.path on storage that all ranks share"
            )
        try:
            self._folder.put_in_place(temporary, final, manifest)
        except OSError as error:
            return _cannot_write(final, error)
        return None

    def newest(self, world: World) -> Manifest | None:
        """The newest checkpoint that is whole, which all ranks verify together; None where there is none.

        Raises:
            CheckpointError: it is of another model, seed or optimizer; or there are checkpoints, none of
                which can be used.
        """
        names, aside, failure = world.from_rank_0(self._list() if world.rank == 0 else None, patient=True)
        if failure is not None:
            raise CheckpointError(failure)
        problems = []
        for name in names:
            checked = self._verified(world, name)
            if isinstance(checked, Manifest):
                self._folder.is_sound(name)
                checked.refuse_other(self._job, self._path)
                return checked
            problems.append(f"{name}: {checked.reason}")
            if world.rank == 0:
                self._folder.keep_out(name, checked)
        if not (problems or aside):
            return None
        if not self._start_over:
            raise CheckpointError(
                f"{self._path} has checkpoints, and none can be used ({'; '.join(problems or aside)}). None "
                "is removed. To fix: bring back the storage or a checkpoint, or checkpoint.startOver=true"
            )
        if world.rank == 0:
            logger.warning("none of the checkpoints in %s can be used: starting from step 0", self._path)
            with contextlib.suppress(OSError):
                for name in names:
                    self._folder.set_aside(name, corrupt=False)
        return None

    def _list(self) -> tuple[list[str], list[str], str | None]:
        """Names of complete checkpoints, newest first; of those set aside; why they cannot be listed."""
        try:
            return self._folder.names(), self._folder.set_aside_names(), None
        except FileNotFoundError:
            return [], [], None
        except OSError as error:
            return [], [], f"{self._path} cannot be read: {error}. {_REPAIR}"

    def _verified(self, world: World, name: str) -> Manifest | Flaw:
        """The manifest of a checkpoint, if all of its files are as they were written; collective."""
        path, patience = self._path / name, self._patience()
        manifest: Manifest | Flaw = world.from_rank_0(
            read_manifest(path, patience) if world.rank == 0 else None, patient=True
        )
        if isinstance(manifest, Flaw):
            return manifest
        mine = list(flaws(path, manifest, sorted(manifest.files)[world.rank :: world.size], patience))
        found = [flaw for flaws_there in world.gather(mine, patient=True) for flaw in flaws_there]
        if not found:
            return manifest
        # A corrupt file is final, even if others cannot be read for now.
        corrupt = [flaw for flaw in found if flaw.corrupt]
        reasons = dict.fromkeys(flaw.reason for flaw in corrupt or found)
        return Flaw(reason=", ".join(reasons), corrupt=bool(corrupt))

    def load(self, world: World, layers: LayerSet, manifest: Manifest) -> None:
        """Load the tensors of the layers held; collective over the world.

        Raises:
            CheckpointError: the tensors of a layer have other names or shapes, or cannot be read.
        """
        path = self._path / name_of(manifest.step)
        failure: CheckpointError | None = None
        try:
            tensors.load(world, layers, path, self._patience())
        except OSError as error:
            failure = CheckpointError(f"{path} cannot be read: {error}. {_REPAIR}")
        except CheckpointError as error:
            failure = error
        # The others may read for long: wait for them here, without a limit.
        found = world.gather(str(failure) if failure is not None else None, patient=True)
        reason = next((reason for reason in found if reason is not None), None)
        if reason is not None:
            raise failure if failure is not None else CheckpointError(reason)

    def _patience(self) -> Patience:
        return Patience(self._retry_seconds, check=self._check, sleep=self._sleep)


def _cannot_write(path: Path, error: Exception | str) -> str:
    return (
        f"cannot write a checkpoint to {path}: {error}. "
        "To fix: let checkpoint.path be a directory that all ranks share and can write to, with room"
    )
