"""The progress of a simulation, on a terminal."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ballast_policies.simulator.clock import OnProgress, SimulationProgress


@contextlib.contextmanager
def progress_bar(output: str) -> "Iterator[OnProgress | None]":
    """A progress bar on standard error; None for JSON output, or where that is not a terminal."""
    if output == "json":
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
