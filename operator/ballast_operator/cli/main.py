"""The ``ballast`` program (also ``kubectl ballast``): a table of commands, each imported when it is used."""

import errno
import importlib
import signal
from importlib.metadata import version
from typing import Any

import click

COMMANDS = {
    "allocate": ("allocate.command:allocate", "Solve one allocation from a file of jobs."),
    "completion": ("main:completion", "Print a shell's completion of commands."),
    "cost": ("live.cost:cost", "Show costs of jobs, teams and pools of a cluster."),
    "crds": ("crds:crds", "Write the custom resource definitions."),
    "delete": ("live.jobs:delete", "Delete a training job."),
    "demo": ("local.demo:demo", "Run the demo on a local cluster."),
    "doctor": ("live.doctor:doctor", "Check what Ballast needs of a cluster."),
    "down": ("local.up:down", "Stop a local cluster."),
    "explain": ("live.explain:explain", "Explain why a job runs on its GPUs, or waits."),
    "gpus": ("gpus:gpus", "List the catalogue of GPUs, or look one up."),
    "jobs": ("live.jobs:jobs", "List training jobs."),
    "logs": ("live.jobs:logs", "Print the logs of a job's ranks as one."),
    "history": ("live.history:history", "List what jobs did, also deleted ones."),
    "migrate": ("migrate:migrate", "TrainingJobs from jobs of other operators."),
    "operator": ("operator:operator", "Run the operator (as its image does)."),
    "plan": ("plan.command:plan", "Plan a pipeline: layers to stages to ranks."),
    "policy": ("live.policy_diff:policy", "Show what a changed ClusterPolicy would do."),
    "reproduce": ("laboratory:reproduce", "Make a published figure again, by name."),
    "resume": ("live.jobs:resume", "Have a suspended job take part again."),
    "simulate": ("simulate.command:simulate", "Replay a trace of jobs on a cluster of values."),
    "submit": ("live.submit:submit", "Submit training jobs from a file or flags."),
    "support-bundle": ("live.bundle:support_bundle", "Write what somebody needs who looks for a fault."),
    "suspend": ("live.jobs:suspend", "Have a job save and give its GPUs back."),
    "top": ("live.top:top", "Watch pools and jobs of a live cluster."),
    "twin": ("live.history:twin", "Replay the last day in the simulator."),
    "ui": ("live.ui:ui", "Look at a cluster, or at a simulation, in a browser."),
    "up": ("local.up:up", "Start a local cluster with an operator."),
    "whatif": ("live.whatif:whatif", "Try another policy on a live cluster's snapshot."),
}
"""Command name -> (module of this package:attribute, one line for ``ballast --help``)."""

EXTRAS = {"ballast_localcluster": "local", "ballast_trainer": "local", "matplotlib": "plot", "jinja2": "ui"}
"""Package -> the extra of ``ballast-operator`` that installs it."""


_FULL = "free some, or write elsewhere"
_ELSEWHERE = "use another folder; local clusters are built in $XDG_CACHE_HOME and kept in $XDG_STATE_HOME"
_FIXES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EROFS: _ELSEWHERE,
    errno.EACCES: _ELSEWHERE,
}
"""Remedies for errors of the file system."""


class _LazyGroup(click.Group):
    """Lists commands without importing them, so that ``ballast --help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(f"ballast_operator.cli.{module}"), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo(err=True)  # after the terminal's ^C
            raise click.exceptions.Exit(128 + signal.SIGINT) from error
        except OSError as error:
            if error.errno not in _FIXES:
                raise
            what = f"{error.filename}: " if error.filename is not None else ""
            raise click.ClickException(f"{what}{error.strerror}. To fix: {_FIXES[error.errno]}") from error
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
    """Print the completion of commands, options, jobs and namespaces for SHELL.

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
