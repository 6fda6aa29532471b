"""``ballast demo``: the whole story on a local cluster, live, with a summary."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from ballast_operator.demo.manifests import compare_with_type_blind, demo_manifests, read_manifests
from ballast_operator.demo.recorder import Recorder
from ballast_operator.demo.report import render_summary
from ballast_operator.demo.run import DemoError, DemoSettings, run_demo
from ballast_operator.demo.summary import summarise
from ballast_operator.demo.view import render


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run on this cluster; without it, on one that is started here and removed afterwards.",
)
@click.option("--namespace", default="default", show_default=True, help="Where the jobs are made.")
@click.option("--time-limit", default=300.0, show_default=True, help="Seconds until the demo gives up.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def demo(kubeconfig: Path | None, namespace: str, time_limit: float, output: str) -> None:
    """Run three training jobs on a mixed cluster: watch them share, rebalance, repack.

    With --output json the last line of standard output is one JSON object.
    """
    console = Console(stderr=True)
    settings = DemoSettings(
        kubeconfig=kubeconfig,
        manifests=demo_manifests(),
        time_limit_seconds=time_limit,
        namespace=namespace,
    )
    try:
        recorder = _play(settings, console)
    except DemoError as error:
        console.print(f"[red]demo:[/red] {error}")
        sys.exit(1)
    aware, blind = compare_with_type_blind(read_manifests(settings.manifests), recorder.story.pool_gpus())
    summary = summarise(recorder.story, aware=aware, blind=blind)
    if output == "json":
        click.echo(json.dumps(summary))
    else:
        Console().print(render_summary(summary))


def _play(settings: DemoSettings, console: Console) -> Recorder:
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            return run_demo(
                settings,
                say=lambda text: live.console.print(f"demo: {text}"),
                on_change=lambda recorder: live.update(render(recorder.story, now=recorder.now)),
            )
    told = 0

    def narrate(recorder: Recorder) -> None:
        nonlocal told
        for at, text in recorder.story.narration[told:]:
            print(f"{at:6.1f} s  {text}", file=sys.stderr, flush=True)
        told = len(recorder.story.narration)

    return run_demo(
        settings, say=lambda text: print(f"demo: {text}", file=sys.stderr, flush=True), on_change=narrate
    )
