"""The service levels on the page on reliability: ranges, and what recorded runs have measured."""

import json
from pathlib import Path
from typing import Any

HEAD = """Runs of `python benchmarks/operator/scale.py --jobs 5000 --nodes 1000 --record FILE`. etcd,
kube-apiserver, kube-controller-manager and kube-scheduler are real, nodes and trainers are emulated as KWOK
does it; all of it shares one machine. A range is set as Kueue sets its own (`test/performance/scheduler`):
the mean of the recorded runs, of successive versions, with a margin of a fifth to a half; a run outside of
it is bold. 5,000 jobs arrive at once: what is bounded is how long each waits for an answer, and those that
fit for their pods.

`apiServerAdmissionsPerSecond` is how many TrainingJobs the API server alone took with one status each: the
operator cannot exceed it. `leastRequests...`: up to 1,000 jobs, served by a program with the requests that
any operator has to make. `make bench` runs 200 jobs (`--quick`). All recorded figures:
`benchmarks/operator/scale_recorded.json`.

"""


CONTEXT = (
    "apiServerAdmissionsPerSecond",
    "admissionsOverApiServerAlone",
    "leastRequestsAdmissionsPerSecond",
    "applyToPodsP50Seconds",
    "decisionAllP50Seconds",
    "decisionSolveP99Seconds",
    "writesPerArrivedJob",
    "operatorCpuSecondsPerThousandJobs",
    "apiServerCpuSecondsPerThousandJobs",
    "withSolverMemoryMiB",
)
"""Figures without a range that a reader compares the service levels with."""


def service_levels(root: Path) -> str:
    """The section, from the ranges and the recorded runs, the newest last."""
    runs = json.loads((root / "benchmarks/operator/scale_recorded.json").read_text())
    ranges = json.loads((root / "benchmarks/operator/emulated/ranges.json").read_text())
    newest = runs[-1]
    lines = ["| service level | range | mean of the runs | newest run |", "|---|---|---|---|"]
    for name, limits in ranges.items():
        least = limits.get("least")
        limit = f"at least {least:g}" if least is not None else f"at most {limits['most']:g}"
        lines.append(f"| {limits['what']} (`{name}`) | {limit} | {_values(runs, name, limits)} |")
    lines += [f"| `{name}` | | {_values(runs, name, {})} |" for name in CONTEXT if name in newest["figures"]]
    machine = newest["machine"]
    load = f"{machine['loadAverageAtStart'][0]:.1f} to {machine['loadAverageAtEnd'][0]:.1f}"
    lines += [
        "",
        f"The newest of {len(runs)} runs: {newest['jobs']} jobs, {newest['nodes']} nodes, "
        f"{machine['cores']} cores, load average {load}.",
    ]
    return HEAD + "\n".join(lines)


def _values(runs: list[dict[str, Any]], name: str, limits: dict[str, Any]) -> str:
    measured = [run["figures"][name] for run in runs if name in run["figures"]]
    if not measured:
        return "not measured | not measured"
    mean, value = sum(measured) / len(measured), runs[-1]["figures"].get(name)
    if value is None:
        return f"{mean:.3g} | not measured"
    inside = limits.get("least", value) <= value <= limits.get("most", value)
    return f"{mean:.3g} | {value:g}" if inside else f"{mean:.3g} | **{value:g}**"
