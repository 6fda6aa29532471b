"""``ballast-train trace``: a configuration's schedule in time, as text, picture or chrome trace."""

import sys
from pathlib import Path

import click

from ballast_trainer.causes import describe
from ballast_trainer.cli.forecasting import ForecastInput, forecast_options
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.forecast import forecasts, schedule_for
from ballast_trainer.process_exit import end, reason_of

FORMATS = (".json", ".svg", ".txt", ".csv")
_FLOW_STEPS = 2


@click.command()
@forecast_options
@click.option(
    "--even", is_flag=True, help="All stages alike, backwards twice as long as forwards: nothing is measured."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write here: .json for chrome://tracing or Perfetto, .svg, .txt, or .csv as torch reads it. "
    "Default: text to standard output.",
)
def trace(given: ForecastInput, even: bool, out: Path | None) -> None:
    """Show every action of a simulated step in time.

    The partition is the job's first one; two steps where the schedule has no flush.
    """
    from ballast_policies.planning.schedules.costs import even_costs
    from ballast_policies.planning.schedules.exports import chrome_trace, schedule_csv, schedule_svg, timeline
    from ballast_policies.planning.schedules.simulate import simulate

    from ballast_trainer.config import read_job_config

    try:
        if out is not None and out.suffix not in FORMATS:
            raise ConfigurationError(
                "--out", f"{out} must end in one of {', '.join(FORMATS)}. To fix: e.g. step.json"
            )
        if out is not None and not out.parent.is_dir():
            raise ConfigurationError("--out", f"no folder {out.parent}. To fix: make it, or write elsewhere")
        value = given.config()
        config = read_job_config(value)
        if even:
            schedule = schedule_for(config, given.ranks_of(config, 4), steps=_FLOW_STEPS)
            played = simulate(schedule, even_costs(schedule.stages))
        else:
            rows = given.layers(value, microbatches=config.pipeline.microbatches)
            count = given.ranks_of(config, len(rows))
            (found, *_) = forecasts(config, rows, ranks=count, machines=given.machines, steps=_FLOW_STEPS)
            played = found.trace
        text = {
            ".json": lambda: chrome_trace(played),
            ".svg": lambda: schedule_svg(played),
            ".csv": lambda: schedule_csv(played.schedule),
        }.get(out.suffix if out is not None else "", lambda: timeline(played) + "\n")()
        if out is not None:
            out.write_text(text)
    except Exception as error:
        sys.exit(end(reason_of(error), describe(error)))
    if out is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"{out}: {played.schedule.name}, {played.makespan * 1e3:.1f} ms, simulated")
