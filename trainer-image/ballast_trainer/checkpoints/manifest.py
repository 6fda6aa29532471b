"""A checkpoint's manifest, and the verification of its files.

Two findings are kept apart.  A checkpoint is *corrupt* when its bytes were read and are wrong: it
will never be right.  It is *unreadable* when the storage did not give the bytes (a stale handle, a
file that is not visible yet, a permission): it may be whole.
"""

import dataclasses
import json
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ballast_policies.contract.decode import decode_text

from ballast_trainer.errors import CheckpointError

MANIFEST = "manifest.json"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0

Read = TypeVar("Read")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        step: optimizer steps done; the next step to run, and the position in the data.
        layer_count: layers of the model.
        seed: the seed of weights, data order and dropout.
        files: CRC-32 of each file.
        loss_scale: the factor on the loss, 0 unless the precision is fp16, and steps since it changed.
        optimizer: its name in the configuration; None: not noted.
        tied: the parameters that layers share, as text.
        data: where the training data were, as ``Batches.position`` says; empty: not noted.
    """

    step: int
    layer_count: int
    seed: int
    files: Mapping[str, int]
    loss_scale: tuple[float, int] = (0.0, 0)
    optimizer: str | None = None
    tied: tuple[str, ...] = ()
    data: str = ""

    def to_json(self) -> str:
        """Text of the manifest."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Manifest of a text; unknown fields are left out. Raises ValueError: it is no manifest."""
        return decode_text(cls, text, unknown="ignore", spelling=str)

    def refuse_other(self, job: "Manifest", folder: Path) -> None:
        """Refuse the checkpoint in ``folder`` of another job than that of the manifest ``job``.

        Raises:
            CheckpointError: it is of another model, seed or optimizer.
        """
        fix = "give the job a checkpoint.path of its own"
        if self.layer_count != job.layer_count:
            other = f"{self.layer_count} layers, the model has {job.layer_count}"
        elif self.seed != job.seed:
            other = f"seed {self.seed}, the job has {job.seed}"
        elif self.tied != job.tied:
            other = f"a model with {_tied(self.tied)}, this one has {_tied(job.tied)}"
            fix = f"tie or untie the model's weights (Hugging Face: tie_word_embeddings), or {fix}"
        elif None not in (job.optimizer, self.optimizer) and self.optimizer != job.optimizer:
            other = (
                f"the optimizer {self.optimizer}, training.optimizer is {job.optimizer}, "
                "which cannot continue from its state"
            )
            fix = f"{self.optimizer}, or {fix}"
        else:
            return
        raise CheckpointError(f"{folder} has a checkpoint of {other}. To fix: {fix}")


def _tied(ties: tuple[str, ...]) -> str:
    return f"tied weights ({'; '.join(ties)})" if ties else "no tied weights"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Fault of a checkpoint; ``corrupt``: its bytes are wrong, else storage did not give them."""

    reason: str
    corrupt: bool


def checksum(path: Path) -> int:
    """CRC-32 of a file. Raises OSError: it cannot be read."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _regular(path: Path) -> Path:
    """Itself; to open a pipe would wait for its writer.

    Raises:
        OSError: it cannot be looked at.
        ValueError: it is a pipe, a socket or a device.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError("no regular file")
    return path


class Patience:
    """Retries of failed reads, with growing pauses, until its seconds are used up."""

    def __init__(
        self,
        seconds: float,
        *,
        check: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin; after ``seconds`` an error is final, and ``check``, called before each pause, may raise."""
        self._end = time.monotonic() + seconds
        self._check, self._sleep = check, sleep

    def read(self, read: Callable[[], Read]) -> Read:
        """The result of ``read``, called until it succeeds. Raises OSError: the last one, out of time."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return read()
            except OSError:
                left = self._end - time.monotonic()
                if left <= 0:
                    raise
                self._check()
                self._sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def read_manifest(path: Path, patience: Patience) -> Manifest | Flaw:
    """The manifest of the checkpoint in the directory ``path``."""
    try:
        return Manifest.from_json(patience.read(lambda: _regular(path / MANIFEST).read_text()))
    except OSError as error:
        return Flaw(reason=f"{MANIFEST} cannot be read: {error}", corrupt=False)
    except ValueError as error:
        return Flaw(reason=f"{MANIFEST} is damaged: {error}", corrupt=True)


def flaws(path: Path, manifest: Manifest, names: Iterable[str], patience: Patience) -> Iterator[Flaw]:
    """The flaws of the files ``names`` of a checkpoint."""
    for name in names:
        try:
            found = patience.read(lambda file=path / name: checksum(_regular(file)))  # type: ignore[misc]
        except OSError as error:
            yield Flaw(reason=f"{name} cannot be read: {error}", corrupt=False)
        except ValueError as error:
            yield Flaw(reason=f"{name} is damaged: {error}", corrupt=True)
        else:
            if found != manifest.files[name]:
                yield Flaw(reason=f"{name} changed since it was written", corrupt=True)
