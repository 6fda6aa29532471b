"""Checkpoints of a script: each is there whole or not at all, and the newest is found again."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

_NAME = re.compile(r"step-([0-9]{1,16})")


class Checkpoints:
    """Files or folders ``step-N`` in a folder that all ranks see.

    Args:
        folder: made where it is missing.
        keep: how many are kept; older ones are removed.
    """

    def __init__(self, folder: "os.PathLike[str] | str", *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: the newest checkpoint is always kept. To fix: 1 or more")
        self._folder = Path(folder)
        self._keep = keep

    def newest(self) -> tuple[int, Path] | None:
        """(step, path) of the newest; None: there is none."""
        found = self._all()
        return found[-1] if found else None

    def unfinished(self, step: int) -> Path:
        """Path of a checkpoint of this step before it is whole."""
        return self._folder / f".step-{step}.new"

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Let ``write`` make a file or a folder, and give it its name once that is done."""
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh, path = self.unfinished(step), self._folder / f"step-{step}"
        for left in self._folder.glob(".step-*.new"):  # by saves that were killed
            _remove(left)
        write(fresh)
        if not fresh.exists():
            raise FileNotFoundError(
                f"save wrote nothing at {fresh}. To fix: write the checkpoint to the path that it is given"
            )
        _remove(path)
        fresh.rename(path)
        for _, old in self._all()[: -self._keep]:
            if old != path:  # a script that began anew has steps before those that it finds
                _remove(old)
        return path

    def _all(self) -> list[tuple[int, Path]]:
        if not self._folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(match[1]), path) for match, path in named if match is not None)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
