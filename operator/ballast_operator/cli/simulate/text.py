"""A simulation's result as tables for a terminal."""

from ballast_policies.simulator.result import HOUR, Result
from rich.table import Table

from ballast_operator.cli.text_table import averages_table, text_table


def summary_table(result: Result) -> Table:
    """Averages, one a line."""
    kinds = [
        name
        for name, holds in (
            ("heterogeneity-agnostic", result.agnostic),
            ("space sharing", result.space_sharing),
            ("ideal", result.ideal),
        )
        if holds
    ]
    title = f"{result.workload}: {result.policy}" + (f" ({', '.join(kinds)})" if kinds else "")
    percentiles = result.completion_time_percentiles
    fairness = f"{result.finish_time_fairness:.2f} ({result.finish_time_fairness_max:.2f})"
    rows = [
        ("jobs measured", f"{result.jobs_measured}"),
        ("average completion time", f"{result.average_completion_time / HOUR:.2f} h"),
        *((f"  {p} % are done within", f"{s / HOUR:.2f} h") for p, s in percentiles.items()),
    ]
    by_weight = result.average_completion_time_by_weight
    if len(by_weight) > 1:
        rows += [(f"  average of weight {weight:g}", f"{s / HOUR:.2f} h") for weight, s in by_weight.items()]
    rows += [
        ("makespan", f"{result.makespan / HOUR:.2f} h"),
        ("utilisation", f"{result.utilisation:.1%}"),
        ("finish-time fairness, mean (largest)", fairness),
        ("cost", f"{result.cost:,.2f} USD"),
    ]
    if result.spread_fraction:
        rows.append(("GPU time of gangs spread over nodes", f"{result.spread_fraction:.1%}"))
    if result.deadlines:
        rows.append(("deadlines missed", f"{result.deadline_violations} of {result.deadlines}"))
    if not result.ideal:
        share = result.lease_extensions / max(1, result.lease_opportunities)
        rows.append(("leases extended", f"{result.lease_extensions} ({share:.0%})"))
        rows.append((f"rounds of {result.round_seconds:g} s, rules of {result.rules}", f"{result.rounds}"))
    rows.append(("allocations solved, in all", f"{result.solves} in {result.solve_seconds:.2f} s"))
    return averages_table(title, rows)


def per_job_table(result: Result) -> Table:
    """One line a job."""
    headings = ("job", "type", "GPUs", "arrival h", "done after h", "rho", "USD", "hours on")
    rows = [
        (
            job.name,
            job.type,
            str(job.gpus),
            f"{job.arrival / HOUR:.2f}",
            "-" if job.completion_time is None else f"{job.completion_time / HOUR:.2f}",
            "-" if job.rho is None else f"{job.rho:.2f}",
            f"{job.cost:.2f}",
            ", ".join(f"{t} {s / HOUR:.1f}" for t, s in job.seconds_on.items()),
        )
        for job in result.jobs
    ]
    return text_table("jobs", headings, rows, breaks=headings, left=2)
