"""``ballast top``: pools and jobs of a live cluster."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

import click
from rich.text import Text

from ballast_operator.api.conditions import NO_POLICY
from ballast_operator.cli.live.connection import asked, followed, kubeconfig_option, namespace_option
from ballast_operator.cli.option_names import Number, printable
from ballast_operator.cli.text_table import NARROW_COLUMNS, WIDE_COLUMNS, stacked, text_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from ballast_operator.kube.client import Cluster
    from ballast_operator.report.overview import JobLine, Overview


@click.command()
@namespace_option("Jobs of this namespace; default: all.")
@kubeconfig_option
@click.option("--once", is_flag=True, help="Look once and end.")
@click.option("--every", default=1.0, show_default=True, type=Number(min=0.1), help="Seconds between looks.")
@click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: one line a look.",
)
def top(namespace: str, kubeconfig: str | None, once: bool, every: float, output: str) -> None:
    """Watch node pools and training jobs until Ctrl-C."""
    from rich.console import Console

    from ballast_operator.report.overview import read_overview

    with contextlib.suppress(KeyboardInterrupt):
        if not once:
            asked(kubeconfig, lambda cluster: _show(cluster, namespace, every, output), namespace=namespace)
            return
        seen = asked(kubeconfig, lambda cluster: read_overview(cluster, namespace), namespace=namespace)
        if output == "json":
            click.echo(seen.to_json())
        else:
            Console().print(Tables(seen))


async def _show(cluster: "Cluster", namespace: str, every: float, output: str) -> None:
    from rich.live import Live

    from ballast_operator.kube.caches import Caches
    from ballast_operator.kube.kinds import JOB, POLICY
    from ballast_operator.report.overview import overview

    caches = Caches()
    async with followed(cluster, caches, namespace) as left_out:
        with contextlib.nullcontext() if output == "json" else Live(screen=False) as live:
            while True:
                seen = overview(list(caches[JOB]), list(caches[POLICY]), left_out)
                if live is None:
                    click.echo(seen.to_json())
                else:
                    live.update(Tables(seen, most=live.console.height))
                await asyncio.sleep(every)
                # Watches wait for an API server that is gone: nothing else would tell that it is.
                await cluster.serves(JOB)


_POOL = ("pool", "GPU type", "nodes", "GPUs held")
_FIGURES = ("state", "GPUs", "step", "steps/s", "loss", "imbalance", "restarts", "cost")


class Tables:
    """An overview that is laid out for the width at which it is printed.

    ``most``: so many jobs, those that hold GPUs first where there are more; None: all.
    """

    def __init__(self, seen: "Overview", *, most: int | None = None) -> None:
        self._seen, self._jobs = seen, seen.jobs
        if most is not None and len(seen.jobs) > most:
            self._jobs = tuple(sorted(seen.jobs, key=lambda job: not job.gpus)[:most])

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Policies, pools, jobs; where a job is more than one line, reasons have their own table."""
        seen = self._seen
        if not seen.policies:
            yield Text(f"No job gets GPUs: {NO_POLICY}, as in examples/clusterpolicy.yaml")
        for line in seen.policies:
            yield Text(printable(f"ClusterPolicy {line}"))
        pools = [(p.pool, p.gpu_type, str(p.nodes), f"{p.held} of {p.gpus}") for p in seen.pools]
        yield text_table("Pools", _POOL, pools, breaks=_POOL[:2], left=len(_POOL))
        few = f", {len(self._jobs)} of {len(seen.jobs)}" if len(self._jobs) < len(seen.jobs) else ""
        emulated = any(job.emulated for job in self._jobs)
        title = f"Jobs{few}" + (" (speeds marked * are emulated)" if emulated else "")
        jobs = [(f"{job.namespace}/{job.job}", _figures(job), job.why) for job in self._jobs]
        if options.max_width >= WIDE_COLUMNS:
            wide = ("job", *_FIGURES, "why")
            rows = [(name, *figures, why) for name, figures, why in jobs]
            breaks = ("job", "GPUs", "why")
            yield text_table(title, wide, rows, breaks=breaks, left=len(wide), expand=True)
            return
        size = 2 if options.max_width >= NARROW_COLUMNS else len(_FIGURES)
        narrow = ("job", *stacked(_FIGURES, size))
        lines = [(name, *stacked(figures, size)) for name, figures, _ in jobs]
        yield text_table(title, narrow, lines, breaks=narrow[:2], left=len(narrow), show_lines=True)
        reasons = [(name, why) for name, _, why in jobs if why]
        table = text_table("Why", ("job", "why"), reasons, breaks=("job", "why"), left=2, show_lines=True)
        table.columns[0].max_width = 30
        yield table


def _figures(job: "JobLine") -> tuple[str, ...]:
    """Cells by ``_FIGURES``; "-" for unknown values."""
    speed = job.steps_per_second
    held = f"{job.gpus} x {job.gpu_type}" + (f", shared with {job.partner}" if job.partner else "")
    return (
        job.state,
        "\n".join(job.parts) or (held if job.gpus else "-"),
        f"{job.step} / {job.total_steps}",
        "-" if speed is None else f"{speed:.2f}{'*' if job.emulated else ''}",
        "-" if job.loss is None else f"{job.loss:.3f}",
        "-" if job.imbalance is None else f"{job.imbalance:.0%}",
        str(job.restarts),
        f"{job.cost:.2f}",
    )
