"""The live view of the demo: pools, jobs and the latest events."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ballast_operator.demo.story import Story

LINES = 10
"""Lines of narration on the screen."""


def render(story: Story, *, now: float) -> RenderableType:
    """The complete view of the story at one moment."""
    return Group(_pools(story), _jobs(story), _narration(story, now))


def _pools(story: Story) -> Table:
    table = Table(title="Pools (GPU speed is emulated on process nodes)", title_justify="left", expand=True)
    for column in ("pool", "node", "GPUs", "pods"):
        table.add_column(column)
    held = story.gpus_held()
    for node in sorted(story.node_gpus, key=lambda n: (story.node_pools[n], n)):
        pods = [p.name for p in story.pods.values() if p.node == node and p.holds_gpus]
        table.add_row(
            story.node_pools[node], node, f"{held[node]} of {story.node_gpus[node]}", ", ".join(sorted(pods))
        )
    return table


def _jobs(story: Story) -> Table:
    table = Table(title="Jobs", title_justify="left", expand=True)
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
            _number(report.steps_per_second if report else None, "{:.2f}"),
            _number(report.loss if report else None, "{:.3f}"),
            _number(report.imbalance if report else None, "{:.0%}"),
            " ".join(str(s.end_layer - s.first_layer) for s in report.stages) if report else "",
            (status.get("lastDecision") or {}).get("why", ""),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _narration(story: Story, now: float) -> Text:
    lines = [f"{at:6.1f} s  {text}" for at, text in story.narration[-LINES:]]
    return Text("\n".join([f"{now:6.1f} s  now", *lines]))
