"""The service levels on the page on reliability: ranges, and what recorded runs have measured."""

import json
from pathlib import Path
from typing import Any

HEAD = """
## Service levels

Each with the range that it has to be in, and what runs of

    python benchmarks/operator/scale.py --jobs 5000 --nodes 1000 --record FILE

have measured, the earlier ones with fewer jobs. etcd, kube-apiserver,
kube-controller-manager and kube-scheduler are real. Nodes and trainers
are emulated as KWOK does it: Node objects without a kubelet, pods whose status one program writes, reports
of rank 0 without training. All of it shares one machine: seconds of the clock tell of its load as well.
`apiServerCreatesPerSecond` is how many TrainingJobs the API server took then with no operator running,
`apiServerAdmissionsPerSecond` how many with one status written for each: the operator cannot exceed it.
`leastRequests...` are figures of up to 1,000 jobs that a program serves with the requests that any operator
has to make, and nothing else: a status, and for a job that fits a service account and a pod. No decision, no
Lease, no roles, no plans: what the machine alone makes of these figures, with 24 statuses written at a time.
Kueue publishes a suite of its own, of which the ranges here take their way (`test/performance/scheduler`,
`configs/baseline`, June 2026): 15,000 Workloads of 30 queues are created, admitted and ended in 351 s
(range 425), 43 a second, of which large ones wait 6.7 s on average, medium ones 77, small ones 215. It bounds
the scheduling of a full cluster, with the length of the jobs in it; there are neither jobs nor pods nor nodes
nor statuses of users beside Kueue's own object. Here 5,000 jobs arrive at once, and what is bounded is how
long each waits for an answer, and those that fit for their pods.
In bold: outside its range. `make bench` runs 200 jobs (`--quick`), with ranges for counts and ratios that
depend little on the machine, and compares their cost with the last release's. What 20,000 pods take:
`python benchmarks/operator/memory.py`.

"""


def service_levels(root: Path) -> str:
    """The section, from the ranges and the recorded runs, the newest last."""
    runs = json.loads((root / "benchmarks/operator/scale_recorded.json").read_text())
    ranges = json.loads((root / "benchmarks/operator/emulated/ranges.json").read_text())
    newest = runs[-1]
    lines = []
    lines.append("| service level | range |" + "".join(f" {run['label']} |" for run in runs))
    lines.append("|---|---|" + "---|" * len(runs))
    for name, limits in ranges.items():
        least = limits.get("least")
        limit = f"at least {least:g}" if least is not None else f"at most {limits['most']:g}"
        cells = "".join(f" {_cell(run, name, limits)} |" for run in runs)
        lines.append(f"| {limits['what']} (`{name}`) | {limit} |{cells}")
    others = [name for name in newest["figures"] if name not in ranges]
    for name in others:
        cells = "".join(f" {_cell(run, name, {})} |" for run in runs)
        lines.append(f"| `{name}` | |{cells}")
    lines += ["", "| run | nodes | jobs | cores | load average, start to end |", "|---|---|---|---|---|"]
    for run in runs:
        machine = run["machine"]
        load = f"{machine['loadAverageAtStart'][0]:.1f} to {machine['loadAverageAtEnd'][0]:.1f}"
        lines.append(f"| {run['label']} | {run['nodes']} | {run['jobs']} | {machine['cores']} | {load} |")
    return HEAD + "\n".join(lines) + "\n"


def _cell(run: dict[str, Any], name: str, limits: dict[str, Any]) -> str:
    value = run["figures"].get(name)
    if value is None:
        return "not measured"
    inside = limits.get("least", value) <= value <= limits.get("most", value)
    return f"{value:g}" if inside else f"**{value:g}**"
