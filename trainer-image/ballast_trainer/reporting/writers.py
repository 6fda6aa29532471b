"""Writers: destinations of the figures besides standard output. A custom writer has three methods.

``scalars`` gets the numbers of a step, ``event`` everything else, ``close`` ends it.  That is
the shape of trackers' clients, so that adapting one takes five lines::

    class Printing:
        def scalars(self, step, values):
            print(step, values["loss"])

        def event(self, name, step, fields):
            print(step, name)

        def close(self):
            print("ended")

and ``metrics.writer: my_module:Printing`` uses it.
"""

import contextlib
import importlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ballast_policies.contract.job.output import MetricsConfig, MlflowConfig, WandbConfig

from ballast_trainer.causes import with_place
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.registry import load_callable
from ballast_trainer.reporting.console import Reporter, in_json

logger = logging.getLogger(__name__)


VALIDATION_LOSS = "validation_loss"
"""Key of an evaluation's event, and of a scalar of its step."""


class Writer(Protocol):
    """Takes figures of a running job; on rank 0 alone."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of the step that is done: ``loss``, ``step_seconds``, ``ranks``, ``imbalance``, ...

        After an evaluation, once more, with ``validation_loss`` and ``validation_`` of each metric alone.
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
            self._end_torn_line(path)
        except OSError as error:
            reason = f"cannot write {path}: {error}. To fix: a file that rank 0 can write to"
            raise ConfigurationError("metrics.jsonLines", reason) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line."""
        self._write({"step": step, **values})

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """One line."""
        self._write({"event": name, "step": step, **fields})

    def _end_torn_line(self, path: Path) -> None:
        """Begin on a line of its own, also where the last launch's disk was full or it was killed."""
        if path.is_file() and path.stat().st_size:  # a pipe has no end to look at
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    self._file.write("\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"time": time.time(), **in_json(value)}) + "\n")
        self._file.flush()


def _client(name: str, module: str = "") -> Any:
    """The module of a tracker's client. Raises ConfigurationError: its package is not installed."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        reason = f"needs a package that is not installed ({error}). To fix: pip install {name}"
        raise ConfigurationError(f"metrics.{name}", reason) from error


class TensorBoardWriter:
    """Scalars and events as TensorBoard reads them; needs the package ``tensorboard``."""

    def __init__(self, folder: Path) -> None:
        client = _client("tensorboard", "torch.utils.tensorboard")
        try:
            self._writer = client.SummaryWriter(str(folder))
        except OSError as error:
            reason = f"cannot write {folder}: {error}. To fix: a folder that rank 0 can write to"
            raise ConfigurationError("metrics.tensorboard", reason) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point on each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """A text at the step, and the pause as a curve."""
        self._writer.add_text(name, json.dumps(fields), step)
        if "pause_ms" in fields:
            self._writer.add_scalar(f"pause_ms/{name}", fields["pause_ms"], step)

    def close(self) -> None:
        """Write the buffered points."""
        self._writer.close()


@contextlib.contextmanager
def _reached(name: str) -> Iterator[None]:
    """The errors of a tracker's client while a run begins, in words."""
    try:
        yield
    except Exception as error:  # each client has its own
        reason = (
            f"no run can begin: {type(error).__name__}: {error}. To fix: its settings and key, or the network"
        )
        raise ConfigurationError(f"metrics.{name}", reason) from error


class WandbWriter:
    """A run of Weights & Biases; needs the package ``wandb``."""

    def __init__(self, config: WandbConfig, job: Mapping[str, Any]) -> None:
        wandb, named = _client("wandb"), {}
        if config.name is not None:
            named = {"name": config.name, "id": config.name, "resume": "allow"}
        with _reached("wandb"):
            self._run = wandb.init(project=config.project, entity=config.entity, config=dict(job), **named)
            # Steps that are done again after a restart would be refused as wandb's own steps.
            self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point on each curve."""
        self._run.log({"step": step, **values})

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """Its pause as a curve, or a mark."""
        self._run.log({"step": step, f"event/{name}": fields.get("pause_ms", 1)})

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()


class MlflowWriter:
    """A run of MLflow; needs the package ``mlflow``."""

    def __init__(self, config: MlflowConfig, job: Mapping[str, Any]) -> None:
        self._mlflow = mlflow = _client("mlflow")
        with _reached("mlflow"):
            if config.tracking_uri is not None:
                mlflow.set_tracking_uri(config.tracking_uri)
            mlflow.set_experiment(config.experiment)
            known = (
                []
                if config.name is None
                else mlflow.search_runs(
                    experiment_names=[config.experiment],
                    filter_string=f"attributes.run_name = '{config.name}'",
                    order_by=["attributes.start_time DESC"],
                    max_results=1,
                    output_format="list",
                )
            )
            if known:
                run = mlflow.start_run(run_id=known[0].info.run_id)
            else:
                run = mlflow.start_run(run_name=config.name)
                mlflow.log_dict(dict(job), "job.json")
        # A client's active run is that of a thread; ranks that go on in place train on another one.
        self._run_id = run.info.run_id

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point on each curve."""
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run_id)

    def event(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """Its pause as a curve, or a mark."""
        pause = float(fields.get("pause_ms", 1))
        self._mlflow.log_metric(f"event/{name}", pause, step=step, run_id=self._run_id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.MlflowClient().set_terminated(self._run_id)


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
    """Prints by another reporter, passes figures to writers; one that fails is dropped with a warning."""

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
                with ACTIVITY.doing("the figures for", type(writer).__name__):
                    act(writer)
            except Exception as error:  # clients of trackers have errors of their own
                self._writers.remove(writer)
                logger.warning("%s is dropped: %s", type(writer).__name__, error)


def writers_of(config: MetricsConfig, job: Mapping[str, Any] | None = None) -> list[Writer]:
    """The writers that the configuration asks for.

    ``job``: the whole configuration as JSON has it, for trackers that keep it beside the curves.

    Raises:
        ConfigurationError: one of them cannot work: no such package, path or port.
    """
    writers: list[Writer] = []
    if config.json_lines is not None:
        writers.append(JsonLinesWriter(Path(config.json_lines)))
    if config.tensorboard is not None:
        writers.append(TensorBoardWriter(Path(config.tensorboard)))
    if config.writer is not None:
        build = load_callable("metrics.writer", config.writer)
        try:
            made = build()
        except (Exception, SystemExit) as error:  # a user's callable may do anything
            reason = (
                f"{config.writer!r} fails, called without arguments: {with_place(error)}. "
                "To fix: the callable, or leave writer out"
            )
            raise ConfigurationError("metrics.writer", reason) from error
        missing = [name for name in ("scalars", "event", "close") if not callable(getattr(made, name, None))]
        if missing:
            reason = (
                f"{config.writer!r} returned a {type(made).__name__} without {', '.join(missing)}(). "
                "To fix: an object with the methods scalars, event and close"
            )
            raise ConfigurationError("metrics.writer", reason)
        writers.append(made)
    if config.wandb is not None:
        writers.append(WandbWriter(config.wandb, job or {}))
    if config.mlflow is not None:
        writers.append(MlflowWriter(config.mlflow, job or {}))
    if config.port is not None:
        from ballast_trainer.reporting.prometheus import PrometheusWriter

        writers.append(PrometheusWriter(config.port))
    return writers
