"""``ballast whatif --prices FOLDER``: what the cluster's jobs would have cost at the prices of logs."""

import asyncio
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ballast_operator.kube.kinds import Object


def replay_cluster(
    prices: str, *, policy: str, days: float, start: str | None, kubeconfig: str | None, output: str
) -> None:
    """Replay the jobs of the last ``days`` days from ``start`` of the logs on, and print what they cost.

    Raises:
        UsageError: logs or options cannot be used.
    """
    from ballast_operator.cli.simulate.input import EXCERPT
    from ballast_policies.prices.offers import PriceLogError, seconds_of
    from ballast_policies.simulator.settings import SettingsError

    from ballast_lab.commands.simulate_prices import print_result
    from ballast_lab.prices.logs.folder import excerpt, read_market
    from ballast_lab.spot.cluster_jobs import replayed_jobs
    from ballast_lab.spot.engine import replay
    from ballast_lab.spot.settings import SpotSettings

    try:
        market = excerpt() if prices == EXCERPT and not Path(prices).is_dir() else read_market(Path(prices))
        begin = None if start is None else seconds_of(start, where="--start")
        settings = SpotSettings(policy=policy, start=begin, oracle=False)
    except PriceLogError as error:
        raise click.UsageError(f"--prices: {error}") from error
    except SettingsError as error:
        raise click.UsageError(f"--{error}") from error
    now = datetime.datetime.now(datetime.UTC)
    types = {offer.gpu_type for offer in market.spot}
    found = replayed_jobs(asyncio.run(_read(kubeconfig)), types, days=days, now=now)
    if not found.jobs:
        why = "; ".join(found.left_out[:5]) or f"no job was created in the last {days:g} days"
        raise click.ClickException(f"there is nothing to replay: {why}")
    try:
        result = replay(market, list(found.jobs), settings)
    except SettingsError as error:
        raise click.UsageError(f"--{error}") from error
    if output == "json":
        extra = {
            "days": days,
            "cluster_cost_so_far": found.paid,
            "cluster_jobs_finished": found.finished,
            "left_out": list(found.left_out),
        }
        click.echo(json.dumps({**result.to_json(per_job=True), **extra}, indent=2))
        return
    print_result(result, per_job=False)
    count = f"{len(found.jobs)} jobs of the last {days:g} days, {found.finished} of them finished"
    click.echo(f"{count}; on the cluster they have cost {found.paid:,.2f} so far")
    for line in found.left_out:
        click.echo(f"left out: {line}")


async def _read(kubeconfig: str | None) -> "list[Object]":
    from ballast_operator.kube.client import connect
    from ballast_operator.kube.kinds import JOB

    async with await connect(kubeconfig) as cluster:
        items, _ = await cluster.list(JOB)
        return list(items)
