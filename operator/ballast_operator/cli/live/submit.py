"""``ballast submit``: training jobs from a file, or one from flags."""

import contextlib
import math
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.connection import kubeconfig_option
from ballast_operator.cli.live.jobs import connected, print_objects
from ballast_operator.cli.live.manifests import read_manifests
from ballast_operator.cli.terminal import printable

if TYPE_CHECKING:
    from ballast.client import Job

FLAGS = (
    "name",
    "image",
    "gpus",
    "steps",
    "gpu_types",
    "environment",
    "volume",
    "checkpoint",
    "team",
    "budget",
)


@click.command()
@click.argument("command", nargs=-1)
@click.option("-f", "--file", metavar="FILE", help="TrainingJobs as YAML or JSON; -: standard input.")
@click.option("--name", help="Of the job.")
@click.option("--image", help="Of its container.")
@click.option("--gpus", metavar="N|MIN-MAX", help="How many, or the fewest and the most.")
@click.option("--steps", type=click.IntRange(min=1), help="spec.totalSteps.")
@click.option("--gpu-type", "gpu_types", multiple=True, metavar="TYPE", help="Only on these. [default: any]")
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Of the container.")
@click.option("--volume", metavar="CLAIM", help="A PersistentVolumeClaim, mounted at /checkpoints.")
@click.option("--checkpoint", metavar="FOLDER", help="[default: /checkpoints/NAME with --volume]")
@click.option("--team", help="spec.entity.")
@click.option("--budget", type=float, help="What it may cost.")
@click.option("-n", "--namespace", help="Where; default: the manifest's, else default.")
@kubeconfig_option
@click.option("--wait", is_flag=True, help="Until the jobs have ended; exit code 1: one has failed.")
@click.option("--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
def submit(
    command: tuple[str, ...],
    file: str | None,
    namespace: str | None,
    kubeconfig: str | None,
    wait: bool,
    output: str,
    **flags: Any,
) -> None:
    r"""Submit training jobs: those of a file, or one that runs COMMAND, a process a GPU.

    \b
    ballast submit -f job.yaml
    ballast submit --name mine --image mine:1 --gpus 2 --steps 1000 -- python train.py
    """
    if file is None:
        manifests = [_manifest(command, flags)]
    elif command or any(flags[name] not in (None, ()) for name in FLAGS):
        raise click.UsageError("-f: not with COMMAND or options of a job. To fix: write them into the file")
    else:
        manifests = read_manifests(file)
    with connected(kubeconfig) as client:
        made = [client.submit(manifest, namespace=namespace) for manifest in manifests]
        if output in ("json", "yaml"):
            items = [job.raw for job in made]
            print_objects(items[0] if len(items) == 1 else {"kind": "List", "items": items}, output)
        else:
            for job in made:
                click.echo(f"{job.namespace}/{job.name} submitted; `ballast explain {job.name}` says more")
        if wait:
            with contextlib.suppress(KeyboardInterrupt):
                for job in made:
                    client.wait(job.name, namespace=job.namespace, each=_tell)


def _tell(job: "Job") -> None:
    click.echo(printable(f"{job}"), err=True)


def _manifest(command: tuple[str, ...], flags: dict[str, Any]) -> dict[str, Any]:
    from ballast.client import training_job

    needed = {
        "--name": flags["name"],
        "--image": flags["image"],
        "--steps": flags["steps"],
        "COMMAND": command,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise click.UsageError(
            f"{', '.join(missing)}: not given. To fix: -f FILE, or --name, --image, --steps and, after --, "
            "the command; a job with `model` needs a file"
        )
    environment = {}
    for pair in flags["environment"]:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--env: {pair!r:.80} has no name or no =. To fix: NAME=VALUE")
        environment[name] = value
    budget = flags["budget"]
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise click.UsageError(f"--budget: {budget} is no amount. To fix: a number above 0")
    return training_job(
        flags["name"],
        image=flags["image"],
        command=command,
        steps=flags["steps"],
        gpus=_gpus(flags["gpus"] or "1"),
        checkpoint=flags["checkpoint"],
        volume=flags["volume"],
        environment=environment,
        gpu_types=flags["gpu_types"],
        team=flags["team"],
        budget=budget,
    )


def _gpus(text: str) -> tuple[int, int]:
    fewest, dash, most = text.partition("-")
    if not dash:
        most = fewest
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in (fewest, most)):
        raise click.UsageError(f"--gpus: {text!r:.40} is no number of GPUs. To fix: 4, or 2-8")
    if not 1 <= int(fewest) <= int(most):
        raise click.UsageError(f"--gpus: {text} has no GPU, or fewest above most. To fix: 4, or 2-8")
    return int(fewest), int(most)
