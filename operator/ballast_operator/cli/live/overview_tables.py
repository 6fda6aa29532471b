"""The overview of ``ballast top`` as tables that fit the terminal, without truncation at 80 columns."""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ballast_operator.api.policy_conditions import NO_POLICY
from ballast_operator.cli.option_names import printable
from ballast_operator.report.overview import JobLine, Overview

WIDE_COLUMNS = 140
"""From this width on each job is one line; below, figures are stacked and reasons have their own table."""


class Tables:
    """An overview that is laid out for the width at which it is printed."""

    def __init__(self, seen: Overview) -> None:
        self._seen = seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Policies, pools, jobs."""
        if not self._seen.policies:
            yield Text(f"No job gets GPUs: {NO_POLICY}, as in examples/clusterpolicy.yaml")
        for line in self._seen.policies:
            yield Text(printable(f"ClusterPolicy {line}"))
        yield _pools(self._seen)
        if options.max_width >= WIDE_COLUMNS:
            yield _wide(self._seen)
        else:
            yield _narrow(self._seen)
            yield _reasons(self._seen)


def _table(title: str, **columns: bool) -> Table:
    """Columns by heading; True: its cells may be broken anywhere, e.g. names."""
    table = Table(title=title, title_justify="left")
    for heading, breaks in columns.items():
        table.add_column(heading.replace("_", " "), no_wrap=not breaks, overflow="fold")
    return table


def _pools(seen: Overview) -> Table:
    table = _table("Pools", pool=True, GPU_type=True, nodes=False, GPUs_held=False)
    for pool in seen.pools:
        table.add_row(*_texts(pool.pool, pool.gpu_type, str(pool.nodes), f"{pool.held} of {pool.gpus}"))
    return table


def _wide(seen: Overview) -> Table:
    table = Table(title=_title(seen), title_justify="left", expand=True)
    for column in ("job", "state", "GPUs", "step", "steps/s", "loss", "imbalance", "restarts", "cost", "why"):
        table.add_column(column, no_wrap=column not in ("job", "GPUs", "why"), overflow="fold")
    for job in seen.jobs:
        table.add_row(*_texts(_name(job), job.state, *_figures(job), job.why))
    return table


def _narrow(seen: Overview) -> Table:
    table = Table(title=_title(seen), title_justify="left", show_lines=True)
    table.add_column("job", overflow="fold")
    table.add_column("state\nGPUs", overflow="fold")
    for heading in ("step\nsteps/s", "loss\nimbalance", "restarts\ncost"):
        table.add_column(heading, no_wrap=True)
    for job in seen.jobs:
        gpus, step, speed, loss, imbalance, restarts, cost = _figures(job)
        table.add_row(
            *_texts(
                _name(job),
                f"{job.state}\n{gpus}",
                f"{step}\n{speed}",
                f"{loss}\n{imbalance}",
                f"{restarts}\n{cost}",
            )
        )
    return table


def _reasons(seen: Overview) -> Table:
    table = Table(title="Why", title_justify="left", show_lines=True)
    table.add_column("job", overflow="fold", max_width=30)
    table.add_column("why", overflow="fold")
    for job in seen.jobs:
        if job.why:
            table.add_row(*_texts(_name(job), job.why))
    return table


def _texts(*cells: str) -> list[Text]:
    """Cells whose brackets are text, not markup."""
    return [Text(printable(cell)) for cell in cells]


def _title(seen: Overview) -> str:
    return "Jobs (speeds marked * are emulated)" if any(job.emulated for job in seen.jobs) else "Jobs"


def _name(job: JobLine) -> str:
    return f"{job.namespace}/{job.job}"


def _figures(job: JobLine) -> tuple[str, ...]:
    """GPUs, step, steps/s, loss, imbalance, restarts, cost; "-" for unknown values."""
    speed = job.steps_per_second
    held = f"{job.gpus} x {job.gpu_type}" + (f", shared with {job.partner}" if job.partner else "")
    return (
        "\n".join(job.parts) or (held if job.gpus else "-"),
        f"{job.step} / {job.total_steps}",
        "-" if speed is None else f"{speed:.2f}{'*' if job.emulated else ''}",
        "-" if job.loss is None else f"{job.loss:.3f}",
        "-" if job.imbalance is None else f"{job.imbalance:.0%}",
        str(job.restarts),
        f"{job.cost:.2f}",
    )
