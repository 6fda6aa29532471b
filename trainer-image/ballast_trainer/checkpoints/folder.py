"""The directory of a job's checkpoints: their names, renaming of unusable ones, removal of old ones."""

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ballast_trainer.checkpoints.folder_lock import FolderLock
from ballast_trainer.checkpoints.manifest import (
    MANIFEST,
    Flaw,
    Manifest,
    Patience,
    checksum,
    flaws,
    read_manifest,
)

logger = logging.getLogger(__name__)

_PREFIX = "step-"
CORRUPT, UNREADABLE = ".corrupt", ".unreadable"
"""Ends of the names of checkpoints that are set aside."""


class CheckpointFolder:
    """Checkpoints in ``path`` by name; those that cannot be used get another name, none is removed."""

    def __init__(self, path: Path, *, keep: int, patience: Callable[[], Patience]) -> None:
        """Prepare to ``keep`` so many whole ones; ``patience``: for one that cannot be read."""
        self.path = path
        self._keep = keep
        self._patience = patience
        self._sound: set[str] = set()
        self._unreadable: set[str] = set()

    def names(self) -> list[str]:
        """Names of complete checkpoints, newest first. Raises OSError: the directory cannot be read."""
        try:
            found = self._all_names()
        except FileNotFoundError:
            return []
        return sorted(filter(_is_complete, found), key=_step_of, reverse=True)

    def set_aside_names(self) -> list[str]:
        """Names of those that were set aside. Raises OSError: the directory cannot be read."""
        found = sorted(self._all_names())
        return [name for name in found if name.startswith(_PREFIX) and not _is_complete(name)]

    def _all_names(self) -> list[str]:
        return self._patience().read(lambda: [path.name for path in self.path.iterdir()])

    def is_sound(self, name: str) -> None:
        """It was verified or written by this run."""
        self._sound.add(name)

    def newest_left(self, step: int | None) -> int | None:
        """``step``, or where its checkpoint is gone, that of the newest before it; None: there is none."""
        if step is None or not _is_gone(self.path / name_of(step)):
            return step
        try:
            names = [path.name for path in self.path.iterdir()]
        except OSError:
            return None
        left = [_step_of(name) for name in names if _is_complete(name)]
        return max((older for older in left if older < step), default=None)

    def _keep_lock(self, lock: FolderLock | None) -> None:
        if lock is None or not lock.gone() or self._has_others():
            return
        whole = self.path.exists()
        if lock.retake():
            lost = (
                "its lock was removed" if whole else "it was removed, with its checkpoints, and is made again"
            )
            logger.warning("%s: %s while this run writes to it", self.path, lost)

    def is_taken(self, lock: FolderLock | None) -> bool:
        """True if another run has the directory, or has had it since this one held its lock."""
        if lock is None or lock.held():
            return False
        return not lock.gone() or self._has_others()

    def _has_others(self) -> bool:
        """True if a checkpoint is newer than this run's, and neither written nor verified by it."""
        newest = max(map(_step_of, self._sound), default=-1)
        try:
            # A folder that is gone will not appear by waiting, and training waits, too.
            names = self.names() if self.path.is_dir() else []
            return any(_step_of(name) > newest and name not in self._unreadable for name in names)
        except OSError:
            return False

    def remove_partial(self) -> None:
        """Remove partial files of writers that have ended; none of them could be loaded."""
        for left in self.path.glob(f".{_PREFIX}*.partial"):
            shutil.rmtree(left, ignore_errors=True)

    def make_room(self, final: Path, lock: FolderLock | None = None) -> bool:
        """True if a whole checkpoint is there already; one that cannot be used is set aside.

        Where this run's ``lock`` was removed, e.g. with the directory, both are made again.

        Raises:
            OSError: it cannot be renamed, or the lock not taken.
        """
        self._keep_lock(lock)
        if not final.exists():
            return False
        if final.name in self._sound:
            return True
        found = sound_or_flaw(final, self._patience())
        if isinstance(found, Manifest):
            self._sound.add(final.name)
            return True
        self.set_aside(final.name, corrupt=found.corrupt)
        return False

    def put_in_place(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        """Add the manifest, rename the checkpoint into place, remove older ones. Raises OSError."""
        rest = [path for path in temporary.iterdir() if path.name not in manifest.files]
        files = {**manifest.files, **{path.name: checksum(path) for path in rest}}
        manifest = dataclasses.replace(manifest, files=files)
        write_durably(temporary / MANIFEST, manifest.to_json())
        temporary.rename(final)
        sync(self.path)
        self._sound.add(final.name)
        self._prune()

    def keep_out(self, name: str, flaw: Flaw) -> None:
        """A checkpoint cannot be used: a corrupt one is renamed, an unreadable one stays."""
        what = "corrupt" if flaw.corrupt else "unreadable"
        logger.warning("skipping the %s checkpoint %s: %s", what, self.path / name, flaw.reason)
        self._unreadable.add(name)
        if flaw.corrupt:
            with contextlib.suppress(OSError):
                self.set_aside(name, corrupt=True)

    def set_aside(self, name: str, *, corrupt: bool) -> None:
        """Give a checkpoint that cannot be used another name. Raises OSError: it cannot be renamed."""
        end = CORRUPT if corrupt else UNREADABLE
        target, number = self.path / (name + end), 1
        while target.exists():
            number += 1
            target = self.path / f"{name}{end}-{number}"
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).rename(target)

    def _prune(self) -> None:
        """Remove those that are older than the newest ``keep`` which this run has written or verified."""
        with contextlib.suppress(OSError):
            names = [name for name in self.names() if name not in self._unreadable - self._sound]
            sound = [name for name in names if name in self._sound]
            if len(sound) >= self._keep:
                for name in names[names.index(sound[self._keep - 1]) + 1 :]:
                    shutil.rmtree(self.path / name, ignore_errors=True)


def name_of(step: int) -> str:
    """The checkpoint's name after ``step`` steps."""
    return f"{_PREFIX}{step:08d}"


def _step_of(name: str) -> int:
    return int(name.removeprefix(_PREFIX))


def _is_complete(name: str) -> bool:
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal()


def _is_gone(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:
        # Storage that does not answer may still have it.
        return False


def write_durably(path: Path, text: str) -> None:
    """Write a file that lasts through a loss of power. Raises OSError: it is what it was before."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, last through a loss of power. Raises OSError: that failed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sound_or_flaw(path: Path, patience: Patience) -> Manifest | Flaw:
    """The manifest of a checkpoint whose files are as they were written, or what is wrong with it."""
    found = read_manifest(path, patience)
    if isinstance(found, Flaw):
        return found
    return next(flaws(path, found, sorted(found.files), patience), found)
