"""The cluster that a command looks at: its option, and what is said where it cannot be reached."""

import contextlib
from collections.abc import Iterator

import click

kubeconfig_option = click.option(
    "--kubeconfig", type=click.Path(exists=True, dir_okay=False), help="Default: $KUBECONFIG."
)


@contextlib.contextmanager
def cluster_errors() -> Iterator[None]:
    """Within it, what a cluster raises that cannot be reached or read is an error of the command.

    Raises:
        click.ClickException: in place of an error of the operator's or of the connection's settings.
    """
    from kubernetes.aio.config import ConfigException

    from ballast_operator.errors import OperatorError

    try:
        yield
    except ConfigException as error:
        fix = "give --kubeconfig, or set KUBECONFIG; `ballast up` starts a cluster here and prints its file"
        raise click.ClickException(f"{error}. To fix: {fix}") from error
    except OperatorError as error:
        raise click.ClickException(f"{error}. To fix: give --kubeconfig, or check the connection") from error
