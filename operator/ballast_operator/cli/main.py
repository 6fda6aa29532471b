"""The ``ballast`` program (also ``kubectl ballast``): a table of commands, each imported when it is used."""

import errno
import importlib
import signal
from importlib.metadata import version
from typing import Any

import click

COMMANDS = {
    "allocate": (
        "ballast_operator.cli.allocate.command:allocate",
        "Solve one allocation from a file of jobs.",
    ),
    "completion": ("ballast_operator.cli.main:completion", "Print a shell's completion of commands."),
    "cost": ("ballast_operator.cli.live.cost:cost", "What jobs, teams and pools of a live cluster cost."),
    "crds": ("ballast_operator.cli.crds:crds", "Write the custom resource definitions."),
    "delete": ("ballast_operator.cli.live.jobs:delete", "Delete a training job."),
    "demo": ("ballast_operator.cli.local.demo:demo", "Run the demo on a local cluster."),
    "doctor": ("ballast_operator.cli.live.doctor:doctor", "Check what Ballast needs of a cluster."),
    "down": ("ballast_operator.cli.local.up:down", "Stop a local cluster."),
    "explain": ("ballast_operator.cli.live.explain:explain", "Explain why a job runs on its GPUs, or waits."),
    "gpus": ("ballast_operator.cli.gpus:gpus", "List the catalogue of GPUs, or look one up."),
    "jobs": ("ballast_operator.cli.live.jobs:jobs", "List training jobs."),
    "logs": ("ballast_operator.cli.live.jobs:logs", "Print the logs of a job's ranks as one."),
    "history": ("ballast_operator.cli.live.history:history", "What jobs did, also deleted ones."),
    "migrate": ("ballast_operator.cli.migrate:migrate", "TrainingJobs from jobs of other operators."),
    "operator": ("ballast_operator.cli.operator:operator", "Run the operator (as its image does)."),
    "plan": ("ballast_operator.cli.plan.command:plan", "Plan a pipeline: layers to stages to ranks."),
    "policy": ("ballast_operator.cli.live.policy_diff:policy", "Show what a changed ClusterPolicy would do."),
    "reproduce": ("ballast_operator.cli.laboratory:reproduce", "Make a published figure again, by name."),
    "resume": ("ballast_operator.cli.live.jobs:resume", "Have a suspended job take part again."),
    "simulate": (
        "ballast_operator.cli.simulate.command:simulate",
        "Replay a trace of jobs on a cluster of values.",
    ),
    "submit": ("ballast_operator.cli.live.submit:submit", "Submit training jobs from a file or flags."),
    "support-bundle": (
        "ballast_operator.cli.live.bundle:support_bundle",
        "Write what somebody needs who looks for a fault.",
    ),
    "suspend": ("ballast_operator.cli.live.jobs:suspend", "Have a job save and give its GPUs back."),
    "top": ("ballast_operator.cli.live.top:top", "Watch pools and jobs of a live cluster."),
    "twin": ("ballast_operator.cli.live.history:twin", "Replay the last day in the simulator."),
    "ui": ("ballast_operator.cli.live.ui:ui", "Look at a cluster, or at a simulation, in a browser."),
    "up": ("ballast_operator.cli.local.up:up", "Start a local cluster with an operator."),
    "whatif": ("ballast_operator.cli.live.whatif:whatif", "Try another policy on a live cluster's snapshot."),
}
"""Command name -> (module:attribute, one line for ``ballast --help``)."""

EXTRAS = {"ballast_localcluster": "local", "ballast_trainer": "local", "matplotlib": "plot", "jinja2": "ui"}
"""Package -> the extra of ``ballast-operator`` that installs it."""


class _LazyGroup(click.Group):
    """Lists commands without importing them, so that ``ballast --help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo(err=True)  # after the terminal's ^C
            raise click.exceptions.Exit(128 + signal.SIGINT) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            fix = "free some, or write elsewhere"
            raise click.ClickException(f"{error.strerror or error}. To fix: {fix}") from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            raise click.ClickException(
                f"this command needs the Python package {package!r}. "
                f"To fix: pip install 'ballast-operator[{EXTRAS[package]}]'"
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("ballast-operator"), prog_name="ballast")
def main() -> None:
    """Train on mixed GPUs under Kubernetes: allocate, plan, simulate, run."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion of commands and options for SHELL.

    \b
    bash: echo 'source <(ballast completion bash)' >> ~/.bashrc
    zsh:  echo 'source <(ballast completion zsh)' >> ~/.zshrc
    fish: ballast completion fish > ~/.config/fish/completions/ballast.fish
    """  # noqa: D301 - click reads the escape
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    script = found(main, {}, "ballast", "_BALLAST_COMPLETE")
    click.echo(script.source_template % script.source_vars())
