"""Writers: destinations of the figures besides standard output. A custom writer has three methods.

``scalars`` gets the numbers of a step, ``event`` everything else, ``close`` ends it.  That is
the shape of TensorBoard's and W&B's clients, so that adapting one takes five lines::

    class WandbWriter:
        def __init__(self):
            self.run = wandb.init(project="pipelines")

        def scalars(self, step, values):
            self.run.log(values, step=step)

        def event(self, name, step, fields):
            self.run.log({f"event/{name}": 1}, step=step)

        def close(self):
            self.run.finish()

and ``metrics.writer: my_module:WandbWriter`` uses it.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ballast_policies.contract.job import MetricsConfig

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.registry import load_callable
from ballast_trainer.reporting.console import Reporter, in_json

logger = logging.getLogger(__name__)


VALIDATION_LOSS = "validation_loss"
"""Of the event of an evaluation, and a scalar of its step."""


class Writer(Protocol):
    """Takes figures of a running job; on rank 0 alone."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of the step that is done: ``loss``, ``step_seconds``, ``ranks``, ``imbalance``, ...

        After an evaluation, once more, with ``validation_loss`` alone.
        """

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """Something happened after ``step``: launch, rebalance, repack, migrate, checkpoint, ..."""

    def close(self) -> None:
        """The job ends here."""


class JsonLinesWriter:
    """Appends an object a step and an event to a file, with the time in seconds since 1970."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        except OSError as error:
            reason = f"cannot write {path}: {error}. To fix: a file that rank 0 can write to"
            raise ConfigurationError("metrics.jsonLines", reason) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line."""
        self._write({"step": step, **values})

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """One line."""
        self._write({"event": name, "step": step, **fields})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"time": time.time(), **in_json(value)}) + "\n")
        self._file.flush()


class TensorBoardWriter:
    """Scalars and events as TensorBoard reads them; needs the package ``tensorboard``."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            reason = (
                f"{str(folder)!r} needs a package that is not installed ({error}). "
                "To fix: install tensorboard, or use metrics.jsonLines"
            )
            raise ConfigurationError("metrics.tensorboard", reason) from error
        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point on each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """A text at the step, and the pause as a curve."""
        self._writer.add_text(name, json.dumps(fields), step)
        if isinstance(fields.get("pause_ms"), int | float):
            self._writer.add_scalar(f"pause_ms/{name}", fields["pause_ms"], step)

    def close(self) -> None:
        """Write the buffered points."""
        self._writer.close()


def scalars_of(fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step line, the number of ranks, and the layers on the fullest one."""
    values = {
        name: float(value)
        for name, value in fields.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    held: dict[int, int] = {}
    for stage in fields.get("stages", ()):
        held[stage["rank"]] = held.get(stage["rank"], 0) + stage["endLayer"] - stage["firstLayer"]
    return values | ({"ranks": float(len(held)), "most_layers": float(max(held.values()))} if held else {})


class WritingReporter:
    """Prints by another reporter, and passes the figures to writers.

    A writer that fails is dropped with a warning: a full disk does not end the training.
    """

    def __init__(self, reporter: Reporter, writers: Sequence[Writer]) -> None:
        self._reporter = reporter
        self._writers = list(writers)

    def step(self, **fields: Any) -> None:
        """Print, and write the numbers."""
        self._reporter.step(**fields)
        values = scalars_of(fields)
        self._each(lambda writer: writer.scalars(fields["step"], values))

    def event(self, name: str, **fields: Any) -> None:
        """Print and write."""
        self._reporter.event(name, **fields)
        rest = {key: value for key, value in fields.items() if key != "step"}
        if isinstance(rest.get(VALIDATION_LOSS), float):
            # A figure like a step's; the event has it, too.
            values = {VALIDATION_LOSS: rest[VALIDATION_LOSS]}
            measured = {f"validation_{key}": value for key, value in rest.get("metrics", {}).items()}
            values |= {key: value for key, value in measured.items() if value is not None}
            self._each(lambda writer: writer.scalars(fields["step"], values))
        self._each(lambda writer: writer.event(name, fields.get("step", 0), rest))

    def close(self) -> None:
        """Close all writers."""
        self._each(lambda writer: writer.close())
        self._writers.clear()

    def _each(self, act: Any) -> None:
        for writer in list(self._writers):
            try:
                act(writer)
            except (OSError, RuntimeError, ValueError) as error:
                self._writers.remove(writer)
                logger.warning("%s is dropped: %s", type(writer).__name__, error)


def writers_of(config: MetricsConfig) -> list[Writer]:
    """The writers that the configuration asks for.

    Raises:
        ConfigurationError: one of them cannot work: no such package, path or port.
    """
    writers: list[Writer] = []
    if config.json_lines is not None:
        writers.append(JsonLinesWriter(Path(config.json_lines)))
    if config.tensorboard is not None:
        writers.append(TensorBoardWriter(Path(config.tensorboard)))
    if config.writer is not None:
        made = load_callable("metrics.writer", config.writer)()
        missing = [name for name in ("scalars", "event", "close") if not callable(getattr(made, name, None))]
        if missing:
            reason = (
                f"{config.writer!r} returned a {type(made).__name__} without {', '.join(missing)}(). "
                "To fix: an object with the methods scalars, event and close"
            )
            raise ConfigurationError("metrics.writer", reason)
        writers.append(made)
    if config.port is not None:
        from ballast_trainer.reporting.prometheus import PrometheusWriter

        writers.append(PrometheusWriter(config.port))
    return writers
