"""``ballast operator``: the command of the operator's image."""

import asyncio
import gc
import logging
import os
import sys
from typing import Any

import click

from ballast_operator.cli.option_names import Database, Number

SWITCH_SECONDS = 0.001
"""Seconds after which a computing thread yields to another thread that is ready."""

COLLECT_AFTER = (20_000, 10, 10)
"""New objects until cycles among them are looked for: a decision makes 100,000, and frees them by itself."""


@click.command("operator")
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False),
    help="Connect with this file; default: $KUBECONFIG, the pod's service account, or ~/.kube/config.",
)
@click.option("--namespace", default="", help="Look after this namespace's jobs only; default: all.")
@click.option(
    "--lease-namespace",
    default=lambda: os.environ.get("BALLAST_NAMESPACE", "ballast-system"),
    show_default="$BALLAST_NAMESPACE, or ballast-system",
    help="Namespace of the leader's Lease.",
)
@click.option(
    "--metrics-host",
    "health_host",
    default="",
    show_default="every one, of IPv4 and IPv6",
    help="Address of all that is served.",
)
@click.option(
    "--metrics-port",
    "health_port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port of /healthz, /readyz and /metrics; 0: a free one.",
)
@click.option(
    "--ui-port",
    "page_port",
    type=click.IntRange(0, 65535),
    help="Serve the page here; 0: a free port. Default: no page.",
)
@click.option(
    "--history",
    type=Database(),
    default=lambda: os.environ.get("BALLAST_HISTORY"),
    show_default="$BALLAST_HISTORY, or nowhere",
    help="Keep what jobs did, after they are deleted, in this SQLite file or in "
    "postgresql://USER:PASSWORD@HOST/DATABASE.",
)
@click.option("--history-days", type=Number(min=0, min_open=True), default=90, show_default=True)
@click.option("--history-jobs", type=click.IntRange(min=1), default=100_000, show_default=True)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Level of the log on standard error.",
)
def operator(history_days: float, history_jobs: int, log_level: str, **given: Any) -> None:
    """Run the operator until SIGTERM."""
    # What is imported stays: the collector would walk through it again and again.
    gc.set_threshold(*COLLECT_AFTER)
    from kubernetes.aio.config import ConfigException

    from ballast_operator.api.template import trainer_template
    from ballast_operator.app import Operator, Options
    from ballast_operator.errors import LeaseLapsed, NotLeader
    from ballast_operator.history.writer import Keep
    from ballast_operator.settings import from_environment

    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        settings = from_environment(os.environ)
        trainer_template()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    _log_refused_registrations()
    options = Options(keep=Keep(days=history_days, jobs=history_jobs), **given)
    # Decisions are computed in a thread; the event loop must not wait long for it.
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        asyncio.run(Operator(options, settings).run())
    except LeaseLapsed as error:
        logging.getLogger(__name__).warning("%s; restarting", error)
        # A new process holds no state of the term that has ended while it waits for the lease.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except NotLeader as error:
        raise click.ClickException(
            f"{error}: ending; start it again, and it stands by until the lease is free"
        ) from error
    except ConfigException as error:
        raise click.ClickException(
            f"{error}. To fix: give --kubeconfig, or set KUBECONFIG; after `ballast up` it prints the file"
        ) from error
    except OSError as error:
        raise click.ClickException(f"{error}. To fix: choose another --metrics-port or --ui-port") from error


def _log_refused_registrations() -> None:
    """Warn once of plugins that other distributions register and the operator does not use; imports none."""
    from ballast_policies.allocation.registry import POLICIES
    from ballast_policies.planning.balancers.registry import BALANCERS
    from ballast_policies.planning.dynamics import DYNAMICS
    from ballast_policies.planning.schedules.registry import SCHEDULES
    from ballast_policies.registry import Registry

    registries: tuple[Registry[Any], ...] = (POLICIES, SCHEDULES, BALANCERS, DYNAMICS)
    for registry in registries:
        for reason in registry.refused.values():
            logging.getLogger(__name__).warning("%s", reason)
