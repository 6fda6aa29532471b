"""The demo's summary as tables for a terminal."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render_summary(summary: dict[str, Any]) -> RenderableType:
    """Tables of jobs, of layer moves, and of the allocation against the heterogeneity-agnostic one."""
    return Group(_jobs(summary), _moves(summary), _allocations(summary), _sentences(summary))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


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
    table = _table(
        "Allocation: share of time on each GPU type, and the resulting steps/s",
        "job",
        "Ballast",
        "steps/s",
        "heterogeneity-agnostic",
        "steps/s",
        "gain",
    )
    aware, agnostic = summary["allocation"], summary["type_blind_allocation"]
    if aware is None or agnostic is None:
        return table
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
    waited, proposed = (
        summary["waiting_job_started_after_repack_s"],
        summary["waiting_job_started_after_proposal_s"],
    )
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
