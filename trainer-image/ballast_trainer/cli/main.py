"""``ballast-train``: the trainer, in a pod, under torchrun or alone."""

import importlib
import signal
from typing import Any

import click

LAZY = {
    "run": "ballast_trainer.cli.run:run",
    "pod": "ballast_trainer.cli.pod:pod",
    "export": "ballast_trainer.cli.export:export",
    "profile": "ballast_trainer.cli.profile:profile",
    "simulate": "ballast_trainer.cli.forecasting:simulate",
    "trace": "ballast_trainer.cli.forecasting:trace",
}
"""Command -> where it lives; importing torch takes seconds, so a command is loaded when it is called."""


class LazyGroup(click.Group):
    """Loads a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names."""
        return sorted(LAZY)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        if cmd_name not in LAZY:
            return None
        module, _, attribute = LAZY[cmd_name].partition(":")
        command: Any = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; Ctrl-C ends it as it ends a program of the shell, an error by its own words."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo(err=True)  # after the terminal's ^C
            raise click.exceptions.Exit(128 + signal.SIGINT) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            from ballast_trainer.causes import describe
            from ballast_trainer.process_exit import end, reason_of

            raise click.exceptions.Exit(end(reason_of(error), describe(error))) from error


@click.group(cls=LazyGroup, context_settings={"auto_envvar_prefix": "BALLAST_TRAIN"})
@click.version_option(package_name="ballast-trainer")
def main() -> None:
    """Train a pipeline that reshapes itself while it runs."""
