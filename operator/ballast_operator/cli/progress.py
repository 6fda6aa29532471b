"""How far a simulation is, on a terminal."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(output: str) -> Iterator[Callable[[int, int, float], None] | None]:
    """A bar on a terminal; nothing where the output is read by a program."""
    if output == "json":
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("jobs done"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[clock]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("jobs", total=None, clock="")
        seen = -1

        def show(done: int, total: int, now: float) -> None:
            nonlocal seen
            if done != seen:
                seen = done
                bar.update(task, completed=done, total=total, clock=f"hour {now / 3600:.0f}")

        yield show
