"""``ballast-train simulate``: step time, idle time and memory of a configuration, without running it."""

import json
import sys
from pathlib import Path

import click

from ballast_trainer.causes import describe
from ballast_trainer.cli.forecasting import FILE, ForecastInput, forecast_options
from ballast_trainer.forecast import Forecast, forecasts
from ballast_trainer.process_exit import end, reason_of
from ballast_trainer.replay import Replay, read_loads, replay


def _text(found: Forecast) -> str:
    formula = f", {found.formula_seconds * 1e3:.1f} ms by AMP's formula" if found.formula_seconds else ""
    lines = [
        f"{found.name}: {found.schedule}, a step takes {found.step_seconds * 1e3:.1f} ms{formula}",
        f"  idle {found.bubble.idle:.1%} = schedule {found.bubble.inherent:.1%} + imbalance "
        f"{found.bubble.dynamic:.1%}; busiest rank {found.imbalance:.1%} over the mean",
        f"  {'rank':>4} {'layers':>14} {'busy ms':>8} {'in flight':>9} {'versions':>8} {'held MB':>8} "
        f"{'kept MB':>8} {'all MB':>8}",
    ]
    for rank in found.ranks:
        layers = " ".join(f"{first}-{last - 1}" for first, last in rank.layers)
        lines.append(
            f"  {rank.rank:>4} {layers:>14} {rank.busy_seconds * 1e3:8.1f} {rank.in_flight:9} "
            f"{rank.weight_versions:8} {rank.held_bytes / 1e6:8.1f} {rank.activation_bytes / 1e6:8.1f} "
            f"{rank.bytes / 1e6:8.1f}"
        )
    return "\n".join(lines)


def _replay_text(found: Replay, ranks: int) -> str:
    gain = found.static_seconds / found.followed_seconds
    most = found.static_seconds / found.best_seconds
    return (
        f"{found.looks} looks, {len(found.moves)} moves over {ranks} ranks: a step takes "
        f"{found.followed_seconds * 1e3:.1f} ms, {found.static_seconds * 1e3:.1f} ms with the best cut that "
        f"stays, {found.best_seconds * 1e3:.1f} ms with the best at each look: {gain:.3f} of at most "
        f"{most:.3f} times as fast"
    )


@click.command()
@forecast_options
@click.option(
    "--loads",
    "loads_path",
    type=FILE,
    help="Replay the load curve that 'run --log json' printed: moves, and what following it wins.",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def simulate(given: ForecastInput, loads_path: Path | None, output: str) -> None:
    """Predict step time, bubble and memory without starting ranks.

    Each rank is taken to be alone on its device, which is as fast as the one that was profiled unless
    --speeds says how fast.
    """
    from ballast_trainer.config import read_job_config

    try:
        value = given.config()
        config = read_job_config(value)
        if loads_path is not None:
            looks = read_loads(loads_path)
            count = given.ranks_of(config, len(looks[0].seconds))
            replayed = replay(config, looks, ranks=count)
            text = _replay_text(replayed, count)
            if output == "json":
                text = json.dumps({"ranks": count, "replay": replayed.as_json()})
            click.echo(text)
            return
        rows = given.layers(value, microbatches=config.pipeline.microbatches, parallelism=config.parallelism)
        count = given.ranks_of(config, len(rows))
        found = forecasts(config, rows, ranks=count, machines=given.machines)
    except Exception as error:
        sys.exit(end(reason_of(error), describe(error)))
    if output == "json":
        click.echo(json.dumps({"ranks": count, "forecasts": [one.as_json() for one in found]}))
    else:
        click.echo("\n".join(_text(one) for one in found))
