"""The demo's manifests, its live view, and its result as one value and as tables for a terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ballast_policies.allocation.problem import Allocation, Job, Problem
from ballast_policies.allocation.registry import allocate
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ballast_operator.demo.story import PodSeen, Story


def render_summary(summary: dict[str, Any]) -> RenderableType:
    """Tables of jobs, of layer moves, and of the allocation against the heterogeneity-agnostic one."""
    return Group(_jobs(summary), _moves(summary), _allocations(summary), _sentences(summary))


def _table(title: str, *columns: str, expand: bool = False) -> Table:
    return Table(*columns, title=title, title_justify="left", expand=expand)


def _jobs(summary: dict[str, Any]) -> Table:
    table = _table("Jobs (GPU speed emulated)", "job", "state", "GPUs", "steps", "loss", "restarts")
    for name, job in summary["jobs"].items():
        table.add_row(
            name,
            str(job["state"]),
            f"{job['gpus']} x {job['gpuType']}",
            str(job["steps"]),
            f"{_number(job['loss_first'], '.3f')} -> {_number(job['loss_last'], '.3f')}",
            str(job["restarts"]),
        )
    return table


def _moves(summary: dict[str, Any]) -> Table:
    table = _table("Layers moved while training", "job", "what", "effect", "training stood still")
    for entry in summary["rebalances"]:
        before, after = _number(entry["imbalance_before"], ".0%"), _number(entry["imbalance_after"], ".0%")
        effect = f"imbalance {before} -> {after}"
        table.add_row(entry["job"], f"rebalance at step {entry['step']}", effect, _ms(entry["pause_ms"]))
    for entry in summary["repacks"]:
        unchanged = (
            "same UIDs, no restart" if entry["survivor_uids_unchanged"] else "UIDs or restarts CHANGED"
        )
        table.add_row(
            entry["job"],
            f"repack onto {len(entry['survivors'])}: {', '.join(entry['survivors'])} ({unchanged})",
            f"gone: {', '.join(entry['released_pods'])}",
            _ms(entry["pause_ms"]),
        )
    return table


def _allocations(summary: dict[str, Any]) -> Table:
    title = "Allocation: share of time on each GPU type, and the resulting steps/s"
    table = _table(title, "job", "Ballast", "steps/s", "heterogeneity-agnostic", "steps/s", "gain")
    aware, agnostic = summary["allocation"], summary["type_blind_allocation"]
    for job, row in aware["fractions"].items():
        speed = aware["effective_steps_per_second"][job]
        agnostic_speed = agnostic["effective_steps_per_second"][job]
        table.add_row(
            job,
            _shares(row),
            f"{speed:.2f}",
            _shares(agnostic["fractions"][job]),
            f"{agnostic_speed:.2f}",
            f"{speed / agnostic_speed:.2f}x" if agnostic_speed > 0 else "-",
        )
    return table


def _sentences(summary: dict[str, Any]) -> Text:
    over = summary["max_gpus_in_use_over_capacity"]
    waited = summary["waiting_job_started_after_repack_s"]
    proposed = summary["waiting_job_started_after_proposal_s"]
    lines = [
        "From the release of the pods to the waiting job's first step: "
        + (f"{waited:.1f} s" if waited is not None else "no job waited for one"),
        "From the proposal to release them: " + (f"{proposed:.1f} s" if proposed is not None else "-"),
        "GPUs handed out beyond those that exist, at the worst moment: "
        + ("none seen" if over is None else str(max(over, 0))),
    ]
    return Text("\n".join(lines))


def _shares(row: dict[str, float]) -> str:
    return ", ".join(f"{kind} {share:.0%}" for kind, share in row.items() if share > 0.005) or "none"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


LINES = 10
"""Lines of narration on the screen."""


def render(story: Story, *, now: float) -> RenderableType:
    """The complete view of the story at one moment."""
    return Group(_pools(story), _live_jobs(story), _narration(story, now))


def _pools(story: Story) -> Table:
    title = "Pools (GPU speed is emulated)"
    table = _table(title, "pool", "node", "GPUs", "pods", expand=True)
    held = story.gpus_held()
    for node in sorted(story.node_gpus, key=lambda n: (story.node_pools[n], n)):
        pods = [p.name for p in story.pods.values() if p.node == node and p.holds_gpus]
        table.add_row(
            story.node_pools[node], node, f"{held[node]} of {story.node_gpus[node]}", ", ".join(sorted(pods))
        )
    return table


def _live_jobs(story: Story) -> Table:
    table = _table("Jobs", expand=True)
    for column in ("job", "state", "GPUs", "step", "steps/s", "loss", "imbalance", "layers on ranks", "why"):
        table.add_column(column, overflow="fold", ratio=3 if column == "why" else None)
    for name, job in sorted(story.job_objects.items()):
        status = job.get("status") or {}
        allocation = status.get("allocation") or {}
        reports = story.reports.get(name)
        report = reports[-1].report if reports else None
        gpus = f"{allocation['gpus']} x {allocation['gpuType']}" if allocation.get("gpuType") else "-"
        table.add_row(
            name,
            status.get("state") or "New",
            gpus,
            f"{report.step if report else 0} / {job['spec']['totalSteps']}",
            _number(report.steps_per_second if report else None, ".2f"),
            _number(report.loss if report else None, ".3f"),
            _number(report.imbalance if report else None, ".0%"),
            " ".join(str(s.end_layer - s.first_layer) for s in report.stages) if report else "",
            (status.get("lastDecision") or {}).get("why", ""),
        )
    return table


def _narration(story: Story, now: float) -> Text:
    lines = [f"{at:6.1f} s  {text}" for at, text in story.narration[-LINES:]]
    return Text("\n".join([f"{now:6.1f} s  now", *lines]))


JsonObject = dict[str, Any]
REPACKING = "Repacking"
"""State of a job whose proposal to hand pods back has been taken up."""


def demo_manifests() -> Path:
    """The folder of the demo's manifests."""
    return Path(__file__).with_name("examples")


def read_manifests(folder: Path) -> list[dict[str, Any]]:
    """Objects of all files, in the order of the files' names."""
    return [
        manifest
        for path in sorted(folder.glob("*.yaml"))
        for manifest in yaml.safe_load_all(path.read_text())
    ]


def compare_with_agnostic(pool_gpus: Mapping[str, int]) -> tuple[Allocation, Allocation]:
    """The policy's allocation of the demo's jobs, and its heterogeneity-agnostic one; pool -> GPUs."""
    manifests = read_manifests(demo_manifests())
    (policy,) = [m for m in manifests if m["kind"] == "ClusterPolicy"]
    capacity: dict[str, int] = {}
    for pool in policy["spec"]["nodePools"]:
        capacity[pool["gpuType"]] = capacity.get(pool["gpuType"], 0) + pool_gpus.get(pool["name"], 0)
    jobs = tuple(_posed(m["metadata"]["name"], m["spec"]) for m in manifests if m["kind"] == "TrainingJob")
    problem = Problem(gpu_types=tuple(capacity), capacity=capacity, jobs=jobs)
    name = policy["spec"]["objective"]["policy"]
    return allocate(name, problem), allocate(name, problem, agnostic=True)


def _posed(name: str, spec: Mapping[str, Any]) -> Job:
    stages = spec["pipeline"]["maxStages"]
    allowed = spec.get("gpuTypes") or [known["gpuType"] for known in spec["throughput"]]
    return Job(
        name=name,
        gpus=stages,
        weight=spec.get("weight", 1.0),
        throughput={
            known["gpuType"]: known["stepsPerSecond"]
            for known in spec["throughput"]
            if known["stages"] == stages and known["gpuType"] in allowed
        },
    )


def summarise(story: Story) -> JsonObject:
    """Summary of a finished (or broken off) demo."""
    aware, agnostic = compare_with_agnostic(story.pool_gpus())
    repacks = [repack for name in sorted(story.job_objects) for repack in _repacks(story, name)]
    after_release, after_proposal = _waiting(story, repacks)
    return {
        "jobs": {name: _job(story, name) for name in sorted(story.job_objects)},
        "repacks": repacks,
        "rebalances": [entry for name in sorted(story.reports) for entry in _rebalances(story, name)],
        "waiting_job_started_after_repack_s": _rounded(after_release),
        "waiting_job_started_after_proposal_s": _rounded(after_proposal),
        "max_gpus_in_use_over_capacity": story.max_gpus_over_capacity,
        "allocation": _allocation(aware),
        "type_blind_allocation": _allocation(agnostic),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _status(story: Story, name: str) -> Mapping[str, Any]:
    status: Mapping[str, Any] = story.job_objects[name].get("status") or {}
    return status


def _job(story: Story, name: str) -> JsonObject:
    status = _status(story, name)
    allocation = status.get("allocation") or {}
    reports = [seen.report for seen in story.reports.get(name, [])]
    losses = [report.loss for report in reports if report.loss is not None]
    return {
        "state": status.get("state"),
        "gpuType": allocation.get("gpuType") or (status.get("lastDecision") or {}).get("gpuType"),
        "gpus": allocation.get("gpus") or _last_gang(story, name),
        "steps": reports[-1].step if reports else 0,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "restarts": sum((status.get("restarts") or {}).values()),
    }


def _last_gang(story: Story, name: str) -> int:
    """GPUs of the pods that were alive at the job's end: those that no repack released."""
    released = {pod for repack in _status(story, name).get("repacks") or [] for pod in repack["releasedPods"]}
    launches: dict[str, list[PodSeen]] = {}
    for pod in story.pods_of(name):
        launches.setdefault(pod.name.rsplit("-", 1)[0], []).append(pod)
    last = list(launches.values())[-1] if launches else []
    return sum(pod.gpus for pod in last if pod.name not in released)


def _repacks(story: Story, name: str) -> list[JsonObject]:
    found = []
    for repack in _status(story, name).get("repacks") or []:
        survivors = [survivor["name"] for survivor in repack["survivors"]]
        uids = {pod: {p.uid for p in story.pods_of(name) if p.name == pod} for pod in survivors}
        restarts = {p.name: p.container_restarts for p in story.pods_of(name)}
        found.append(
            {
                "job": name,
                "released_pods": list(repack["releasedPods"]),
                "survivors": survivors,
                "survivor_uids_unchanged": all(
                    len(uids[pod]) == 1 and restarts.get(pod) == 0 for pod in survivors
                ),
                "pause_ms": repack.get("pauseMs"),
                "step_seconds_before": repack.get("stepSecondsBefore"),
                "step_seconds_after": repack.get("stepSecondsAfter"),
            }
        )
    return found


def _rebalances(story: Story, name: str) -> list[JsonObject]:
    found, seen = [], 0
    for entry in story.reports[name]:
        report = entry.report
        # The imbalance afterwards is measured over the next steps: wait for the report that has it.
        if report.rebalances > seen and report.imbalance_after is not None:
            seen = report.rebalances
            found.append(
                {
                    "job": name,
                    "step": report.last_rebalance_step,
                    "imbalance_before": report.imbalance_before,
                    "imbalance_after": report.imbalance_after,
                    "pause_ms": report.rebalance_pause_ms,
                }
            )
    return found


def _waiting(story: Story, repacks: list[JsonObject]) -> tuple[float | None, float | None]:
    """Seconds that the first job that a repack let in took to its first report.

    Returns:
        Seconds from the moment the released pods were gone, and from the proposal to release them
        (the moment the shrinking job's state became Repacking); None where no job waited for a repack.
    """
    best: tuple[float, float | None] | None = None
    for name, reports in story.reports.items():
        pods = story.pods_of(name)
        if not reports or not pods:
            continue
        for repack in repacks:
            gone = [p.deleted for p in story.pods.values() if p.name in repack["released_pods"]]
            if any(at is None for at in gone):
                continue
            freed = max(at for at in gone if at is not None)
            arrived = story.job_states[name][0][0]
            if not arrived < freed <= pods[0].created:
                continue
            proposals = [
                at for at, state in story.job_states[repack["job"]] if state == REPACKING and at <= freed
            ]
            since_proposal = reports[0].at - proposals[-1] if proposals else None
            if best is None or reports[0].at - freed < best[0]:
                best = (reports[0].at - freed, since_proposal)
    return best or (None, None)


def _allocation(allocation: Allocation) -> JsonObject:
    return {
        "policy": allocation.policy,
        "fractions": {job: dict(row) for job, row in allocation.allocation.items()},
        "effective_steps_per_second": dict(allocation.throughput),
        "normalised": dict(allocation.levels),
    }
