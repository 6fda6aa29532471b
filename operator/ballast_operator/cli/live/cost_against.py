"""``ballast cost --against``: what the recorded jobs would have cost under other policies, and at least."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ballast_operator.cli.live.twin import recorded, replayed

if TYPE_CHECKING:
    from ballast_policies.simulator.replay import Recording, Replay

EVERY = "all"
"""In place of names: each policy that a ClusterPolicy may have."""


def against(path: Path, policies: Sequence[str], since: float | None, until: float | None) -> dict[str, Any]:
    """As JSON: what was paid, what the replay of the policy in force pays, and each of the others.

    Raises:
        ClickException: the file cannot be read, or a policy cannot be used on what is in it.
    """
    from ballast_policies.simulator.least_cost import least_cost

    from ballast_operator.api.cluster_policy import CHOOSABLE

    recording = recorded(path, since, until)
    names = [each for name in policies for each in (CHOOSABLE if name == EVERY else (name,))]
    found = [replayed(recording, name) for name in dict.fromkeys(["", *names])]
    jobs = found[0].jobs
    return {
        "since": recording.since,
        "until": recording.until,
        "jobs": len(jobs),
        "left_out": dict(recording.left_out),
        "recorded": {
            "cost": math.fsum(job.recorded_cost for job in jobs),
            "mean_seconds": _mean([job.recorded_seconds for job in jobs]),
        },
        "in_force": _row(found[0], recording),
        "policies": [_row(each, recording) for each in found[1:]],
        "least_cost": least_cost(recording),
    }


def _row(found: "Replay", recording: "Recording") -> dict[str, Any]:
    """One policy; ``least_cost``: no policy that is done as soon could have paid less."""
    from ballast_policies.simulator.least_cost import least_cost

    starts = {job.one.name: job.arrival for job in recording.jobs}
    ends = [starts[job.job] + job.seconds for job in found.jobs if job.seconds is not None]
    least = least_cost(recording, by=max(ends)) if ends and not found.unfinished else math.inf
    return {
        "policy": found.policy,
        "cost": math.fsum(job.cost for job in found.jobs),
        "mean_seconds": _mean([job.seconds for job in found.jobs if job.seconds is not None]),
        "starts": sum(job.starts for job in found.jobs),
        "unfinished": len(found.unfinished),
        "least_cost": least if math.isfinite(least) else None,
    }


def _mean(seconds: Sequence[float]) -> float | None:
    return math.fsum(seconds) / len(seconds) if seconds else None


def as_text(found: dict[str, Any]) -> str:
    """A table, and the bound."""
    if not found["jobs"]:
        return "no job that can be replayed has ended in this time"
    lines = [f"{'':34} {'cost':>12} {'mean h':>9} {'starts':>7} {'at least':>12}"]
    rows = [
        ("as recorded", found["recorded"] | {"starts": "", "least_cost": None}),
        (f"{found['in_force']['policy']} (replay)", found["in_force"]),
        *((row["policy"], row) for row in found["policies"]),
    ]
    for name, row in rows:
        least = "" if row["least_cost"] is None else f"{row['least_cost']:.2f}"
        mean = "" if row["mean_seconds"] is None else f"{row['mean_seconds'] / 3600:.3f}"
        more = f"  {row['unfinished']} jobs do not end" if row.get("unfinished") else ""
        lines.append(f"{name:34} {row['cost']:12.2f} {mean:>9} {row['starts']:>7} {least:>12}{more}")
    lines.append(
        f"of {found['jobs']} jobs. No policy could have paid less than {found['least_cost']:.2f}, and none "
        "that is done as soon as one of these less than its `at least`"
    )
    lines += [f"left out: {name}: {why}" for name, why in sorted(found["left_out"].items())]
    return "\n".join(lines)
