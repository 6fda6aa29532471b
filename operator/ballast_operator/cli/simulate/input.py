"""The input of ``ballast simulate``: jobs, throughputs, amounts by GPU type; and its progress."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ballast_operator.cli.laboratory import from_lab

if TYPE_CHECKING:
    from ballast_policies.simulator.clock import OnProgress, SimulationProgress
    from ballast_policies.simulator.workloads import Workload
    from ballast_policies.throughput.table import ThroughputTable


@contextlib.contextmanager
def progress_bar(output: str) -> "Iterator[OnProgress | None]":
    """A progress bar on standard error; None for output to programs, or where that is not a terminal."""
    if output != "text":
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        rich.TextColumn("jobs done"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[clock]}"),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("jobs", total=None, clock="")
        seen = (-1, -1)

        def show(moment: "SimulationProgress") -> None:
            # Also by the hour: on an overloaded cluster no measured job may be done for long.
            nonlocal seen
            reached = moment.done, int(moment.seconds / 3600)
            if reached != seen:
                seen = reached
                clock = f"hour {reached[1]}, {moment.waiting} of {moment.present} jobs wait"
                bar.update(task, completed=moment.done, total=moment.total, clock=clock)

        yield show


Number = TypeVar("Number", int, float)
Command = TypeVar("Command", bound=Callable[..., Any])

OPTIONS = {"gpus": "--cluster", "round_seconds": "--round", "jobs_per_hour": "--rate", "count": "--static"}
"""Settings of the simulator -> options that are called otherwise."""

DRAWN = 4000
"""Jobs from which the demand of an endless workload is estimated."""


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that gives a command ``options``, the first of them first in its help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def seconds(name: str, help_text: str, *, default: float = 0.0) -> Callable[[Command], Command]:
    """An option that takes seconds, and shows its default."""
    return click.option(name, type=float, default=default, show_default=True, help=help_text)


def refuse(given: Mapping[str, str], names: Iterable[str], why: str) -> None:
    """Raises UsageError: one of the options ``names`` is ``given``, so stands on the command line."""
    for name in names:
        if name in given:
            raise click.UsageError(f"{given[name]}: {why}")


workload_options = all_of(
    click.option(
        "--trace",
        type=click.Path(path_type=Path),
        help="A trace in Gavel's format, or the name of a built-in one.",
    ),
    click.option(
        "--generate", type=click.Choice(["single", "multiple"]), help="Jobs on one GPU, or on 1 to 8."
    ),
    click.option("--rate", type=float, metavar="JOBS_PER_HOUR", help="With --generate: mean arrival rate."),
    click.option(
        "--static", "static_jobs", type=int, metavar="N", help="N generated jobs that all arrive at 0."
    ),
    click.option("--weights", is_flag=True, help="Generated jobs: 20 % have weight 5."),
    click.option(
        "--deadlines",
        is_flag=True,
        help="Generated jobs: each has a deadline (1.2, 2 or 10 x its V100 time).",
    ),
    click.option(
        "--job-table",
        type=click.Choice(["gavel", "published"]),
        default="gavel",
        show_default=True,
        help="Generated jobs: the order of the types as in Gavel's code, or as for its published curves.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="The same seed is the same workload."
    ),
)
"""The options of :class:`WorkloadOptions`."""


ONLY_ELASTIC = ("workload", "sizes", "until", "pause_seconds", "growth_seconds", "end_seconds")
"""Options of elastic jobs only."""

ONLY_A_REPLAY = ("start", "checkpoint_seconds", "hysteresis", "oracle")
"""Options of a replay of price logs only, by the distribution ballast-lab."""

EXCERPT = "excerpt"
"""Name of the logs that come with Ballast."""


spot_options = all_of(
    click.option(
        "--start",
        metavar="TIME",
        help="With --prices FOLDER: the moment of the logs at which the first job arrives, as "
        "2020-03-01T00:00:00Z. [default: the first price]",
    ),
    click.option(
        "--checkpoint-seconds",
        type=float,
        help="With --prices FOLDER: to save a job; also its pause when it moves. [default: 5]",
    ),
    click.option(
        "--hysteresis",
        type=float,
        metavar="TIMES",
        help="With --prices FOLDER: a move has to save this many times its cost. [default: 1]",
    ),
    click.option(
        "--oracle/--no-oracle",
        default=True,
        help="With --prices FOLDER: leave out the least cost with the future known, which takes most of "
        "the time.",
    ),
)
"""The options of a replay."""


def is_folder_of_prices(prices: str | None) -> bool:
    """True if ``--prices`` names logs; prices themselves are TYPE=USD."""
    return prices is not None and (prices == EXCERPT or "=" not in prices or Path(prices).is_dir())


def table_of(throughputs: str) -> "ThroughputTable":
    """The table of that name, or in that file. Raises ThroughputError: there is none."""
    from ballast_policies.throughput.table import BUILT_IN, ThroughputError, built_in_table, read_table

    if throughputs in BUILT_IN and not Path(throughputs).exists():
        return built_in_table(throughputs)
    try:
        return read_table(Path(throughputs))
    except OSError as error:
        raise ThroughputError(
            f"--throughputs: {throughputs} cannot be read: {error.strerror}. To fix: name a file, or one of "
            f"{', '.join(BUILT_IN)}"
        ) from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The jobs of a trace, or generated ones. Raises UsageError: options that exclude each other."""

    trace: Path | None
    generate: str | None
    rate: float | None
    static_jobs: int | None
    weights: bool
    deadlines: bool
    job_table: str
    seed: int

    def __post_init__(self) -> None:
        if self.rate is not None and (self.trace is not None or self.static_jobs is not None):
            raise click.UsageError("--rate: only jobs of --generate without --static arrive at a rate")
        if self.trace is not None and (self.weights or self.deadlines or self.job_table != "gavel"):
            raise click.UsageError(
                "--weights, --deadlines and --job-table are for generated jobs; a trace has its own"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "WorkloadOptions":
        """Settings among the options of a command."""
        return cls(**{field.name: options[field.name] for field in dataclasses.fields(cls)})

    def workload(self, table: "ThroughputTable") -> "Workload":
        """The jobs. Raises WorkloadError: the trace cannot be read, or a number is impossible."""
        from ballast_policies.simulator.workloads import DISTRIBUTED, Generated, read_trace

        if self.trace is not None:
            if self.generate is not None or self.static_jobs is not None:
                raise click.UsageError("--trace excludes --generate and --static")
            return read_trace(self.trace)
        job_table = DISTRIBUTED
        if self.job_table == "published":
            job_table = from_lab("published-job-table", "--job-table published")
        if self.static_jobs is None and self.generate is None:
            raise click.UsageError(
                "no jobs are given. To fix: --trace FILE, --generate single|multiple, or --static N"
            )
        if self.static_jobs is None and self.rate is None:
            raise click.UsageError("--generate needs --rate JOBS_PER_HOUR")
        return Generated(
            table=table,
            jobs_per_hour=(self.rate or 0.0) if self.static_jobs is None else 0.0,
            count=self.static_jobs,
            seed=self.seed,
            several_gpus=self.generate != "single",
            weights=self.weights,
            deadlines=self.deadlines,
            job_table=job_table,
        ).workload()


def read_amounts(text: str, option: str, number: Callable[[str], Number]) -> dict[str, Number]:
    """``v100=36,p100=4`` as a mapping; a wrong part is a usage error that names ``option``."""
    found: dict[str, Number] = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        if not name or not amount:
            raise click.UsageError(f"{option}: {part!r} is not TYPE=NUMBER. To fix: v100=36,p100=36,k80=36")
        if name in found:
            raise click.UsageError(f"{option}: {name} is named twice")
        try:
            found[name] = number(amount)
        except ValueError as error:
            raise click.UsageError(f"{option}: {amount!r} of {name} is not a number") from error
    return found


def window_of(text: str | None) -> tuple[int, int] | None:
    """``FIRST:END`` as two numbers."""
    if text is None:
        return None
    first, _, end = text.partition(":")
    try:
        return int(first), int(end)
    except ValueError as error:
        raise click.UsageError(f"--measure: {text!r} is not FIRST:END, as 4000:5000") from error


def overload_warning(
    workload: "Workload",
    gpus: Mapping[str, int],
    table: "ThroughputTable",
    *,
    rate: float,
    space_sharing: bool,
) -> str | None:
    """Line that says that jobs arrive faster than any policy can serve them; None where they do not.

    Raises:
        ThroughputError: the table does not know a job's type or a GPU type.
    """
    from ballast_policies.simulator.workloads import load_of

    load = load_of(itertools.islice(workload.jobs, DRAWN), gpus, table, jobs_per_hour=rate)
    if load.least <= 1:
        return None
    pairs = " (pairs on the same GPUs may need less)" if space_sharing else ""
    return (
        f"warning: {rate:g} jobs/h ask on average for {load.fastest_gpus:.4g} GPU hours an hour on their "
        f"fastest types and, however they are placed{pairs}, for {load.least:.3g} times these "
        f"{sum(gpus.values())} GPUs: the queue grows for as long as jobs arrive, and the run may not end. "
        f"To fix: --rate below {rate / load.least:.3g}, or more GPUs"
    )
