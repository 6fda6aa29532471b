"""``ballast policy diff``: what a changed ClusterPolicy would change in the next round."""

import json
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.connection import asked, kubeconfig_option
from ballast_operator.cli.live.manifests import read_manifests

if TYPE_CHECKING:
    from ballast_operator.cli.live.whatif import LiveCluster


@click.group()
def policy() -> None:
    """Look at ClusterPolicies before they are applied."""


@policy.command()
@click.argument("file", type=click.Path())
@kubeconfig_option
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def diff(file: str, kubeconfig: str | None, output: str) -> None:
    """Show what the ClusterPolicy in FILE would change in the next round; nothing is applied."""
    from ballast_policies.allocation.problem import ProblemError

    from ballast_operator.cli.live.whatif import read_change

    items = read_manifests(file)
    if len(items) != 1 or items[0].get("kind") != "ClusterPolicy":
        raise click.ClickException(f"{file}: it is not one ClusterPolicy. To fix: name a file with one")
    try:
        found = difference(*asked(kubeconfig, lambda cluster: read_change(cluster, items[0])))
    except ProblemError as error:
        fix = "" if "To fix" in str(error) else f". To fix: correct {file}"
        raise click.ClickException(f"{error}{fix}") from error
    click.echo(json.dumps(found, indent=2) if output == "json" else as_text(found))


def difference(before: "LiveCluster", after: "LiveCluster") -> dict[str, Any]:
    """Fields of ``spec`` and jobs that differ, each with both values; None: absent, or no GPUs.

    Raises:
        ProblemError: a policy cannot be used on what is there.
    """
    fields = {}
    both = [_flat(live.policy.spec.model_dump(mode="json", by_alias=True)) for live in (before, after)]
    for path in sorted(both[0].keys() | both[1].keys()):
        values = [side.get(path) for side in both]
        if values[0] != values[1]:
            fields[path] = values
    sides = [_round(live) for live in (before, after)]
    jobs = [
        {"job": job, "before": sides[0][job], "after": sides[1].get(job)}
        for job in sorted(sides[0])
        if sides[0][job] != sides[1].get(job)
    ]
    return {"fields": fields, "jobs": jobs, "same": len(sides[0]) - len(jobs)}


def _round(live: "LiveCluster") -> dict[str, dict[str, Any]]:
    """Job -> its GPUs in the next round, and why."""
    from ballast_operator.allocator.forecast import next_round
    from ballast_operator.cli.live.whatif_over_time import in_force

    snapshot = live.snapshot
    decided = next_round(snapshot, in_force(live.policy), now=live.at.timestamp(), live=live.resizable)
    found: dict[str, dict[str, Any]] = {}
    for job in snapshot.jobs:
        at = decided.placements.get(job.name)
        found[job.name] = {"gpus": None if at is None else str(at), "refused": None}
    for refused in snapshot.refused:
        found["/".join(refused.view.key)] = {"gpus": None, "refused": refused.refusal.message}
    return found


def _flat(value: Any, path: str = "spec") -> dict[str, Any]:
    """Path -> value of each leaf; named rows of a list by their names."""
    if isinstance(value, dict) and value:
        return {k: v for key, part in value.items() for k, v in _flat(part, f"{path}.{key}").items()}
    if isinstance(value, list) and value and all(isinstance(row, dict) and "name" in row for row in value):
        return {k: v for row in value for k, v in _flat(row, f"{path}[{row['name']}]").items()}
    return {path: value}


def as_text(found: dict[str, Any]) -> str:
    """A line for each field and job that differs."""
    lines = [f"{path}: {_shown(old)} -> {_shown(new)}" for path, (old, new) in found["fields"].items()]
    lines += [f"{row['job']}: {_where(row['before'])} -> {_where(row['after'])}" for row in found["jobs"]]
    if not found["fields"]:
        lines.append("the ClusterPolicy is as it is in the cluster")
    return "\n".join([*lines, f"in the next round {len(found['jobs'])} jobs differ, {found['same']} do not"])


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _where(side: dict[str, Any] | None) -> str:
    if side is None:
        return "not looked at"
    return side["gpus"] or (f"refused ({side['refused']})" if side["refused"] else "waits")
