"""``ballast demo``: three training jobs on a local cluster, with a live view and a summary."""

import contextlib
import functools
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from kubernetes.client import ApiException
from kubernetes.config import ConfigException
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from urllib3.exceptions import HTTPError

from ballast_operator.cli.option_names import NewFile, Number, printable
from ballast_operator.demo.report import render, render_summary, summarise
from ballast_operator.demo.run import DemoError, run_demo
from ballast_operator.demo.story import Recorder

PICTURE_COLUMNS = 132


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run on this cluster; without it, on one that is started here and removed afterwards.",
)
@click.option(
    "--real-nodes",
    is_flag=True,
    help="Make that one's nodes kubelets with containers (root, Linux). See docs/localcluster.md.",
)
@click.option("--namespace", default="default", show_default=True, help="Where the jobs are made.")
@click.option(
    "--time-limit",
    type=Number(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds until it gives up.",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--picture",
    type=NewFile(),
    help="Also write the fullest moment and the summary as an SVG file.",
)
def demo(
    kubeconfig: Path | None,
    real_nodes: bool,
    namespace: str,
    time_limit: float,
    output: str,
    picture: Path | None,
) -> None:
    """Run three training jobs on a mixed cluster: watch them share, rebalance, repack.

    With --output json the last line of standard output is one JSON object.
    """
    if kubeconfig is None:
        for package in ("ballast_localcluster", "ballast_trainer"):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
    elif real_nodes:
        raise click.UsageError("--real-nodes starts a cluster, and --kubeconfig names one.")
    console = Console(stderr=True)
    play = functools.partial(
        run_demo,
        kubeconfig=kubeconfig,
        real_nodes=real_nodes,
        namespace=namespace,
        time_limit_seconds=time_limit,
    )
    album = _Album()
    try:
        recorder = _watched(play, console, album)
    except DemoError as error:
        console.print("[red]demo:[/red]", Text(str(error)))
        sys.exit(1)
    except (ApiException, ConfigException, HTTPError) as error:
        raise click.ClickException(_refusal(error)) from error
    summary = summarise(recorder.story)
    if picture is not None:
        album.write(picture, summary)
    if output == "json":
        click.echo(json.dumps(summary))
    else:
        Console().print(render_summary(summary))


def _refusal(error: Exception) -> str:
    """Refusal of the cluster, with what to change."""
    text, fix = str(error), "check the kubeconfig and the connection"
    if isinstance(error, ApiException):
        text = f"HTTP {error.status} {error.reason}"
        with contextlib.suppress(ValueError, TypeError, LookupError):
            text += f": {json.loads(error.body)['message']}"
        if error.status in (401, 403):
            fix = "use an administrator's account: the demo installs definitions and roles"
    return printable(f"{text}. To fix: {fix}")


class _Album:
    """Keeps the view with the most jobs on GPUs; of several, the latest."""

    def __init__(self) -> None:
        self._most = 0
        self._view: RenderableType = ""

    def look(self, recorder: Recorder) -> None:
        jobs = {pod.job for pod in recorder.story.pods.values() if pod.holds_gpus}
        if len(jobs) >= self._most:
            self._most = len(jobs)
            self._view = render(recorder.story, now=recorder.now)

    def write(self, path: Path, summary: dict[str, Any]) -> None:
        page = Console(record=True, width=PICTURE_COLUMNS, file=io.StringIO())
        page.print(Group(self._view, "", render_summary(summary)))
        page.save_svg(str(path), title="ballast demo")


def _watched(play: Callable[..., Recorder], console: Console, album: _Album) -> Recorder:
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:

            def draw(recorder: Recorder) -> None:
                album.look(recorder)
                live.update(render(recorder.story, now=recorder.now))

            return play(announce=lambda text: live.console.print(f"demo: {text}"), on_change=draw)
    return play(
        announce=lambda text: print(f"demo: {text}", file=sys.stderr, flush=True),
        on_change=_narrator(album),
    )


def _narrator(album: _Album) -> Callable[[Recorder], None]:
    told = 0

    def narrate(recorder: Recorder) -> None:
        nonlocal told
        album.look(recorder)
        for at, text in recorder.story.narration[told:]:
            print(f"{at:6.1f} s  {text}", file=sys.stderr, flush=True)
        told = len(recorder.story.narration)

    return narrate
