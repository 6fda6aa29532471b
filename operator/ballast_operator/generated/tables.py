"""Tables of the documentation, from the rows of the registries."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.registry import POLICIES
from ballast_policies.allocation.solvers.methods import METHODS
from ballast_policies.planning.balancers.registry import BALANCERS
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.planners.registry import PLANNERS
from ballast_policies.planning.schedules import DEFAULT_STAGES_PER_RANK, SCHEDULES


def policies_table() -> str:
    """What each policy solves, reads and proves."""
    rows = []
    for name, policy in POLICIES.builtin.items():
        reads = ", ".join(field if " " in field else f"`{field}`" for field in Reads if field in policy.reads)
        proven = "proven" if policy.proves_gap else "none"
        elastic = "yes" if policy.takes_configurations else "no"
        rows.append((f"`{name}`", policy.summary, reads, policy.space_sharing.value, elastic, proven))
    return table(("policy", "problem", "reads", "shares", "elastic", "gap"), rows)


def specification() -> str:
    """The programs of the specification as they stand, read and not imported: cvxpy is a large module."""
    found = importlib.util.find_spec("ballast_policies.allocation.specification")
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text()
    programs = text[text.index("\ndef ") : text.index("\ndef isolated(")]
    return f"```python\n{programs.strip()}\n```"


def methods_table() -> str:
    """Which method solves which program, what answers where it cannot, and what it saves."""
    rows = [
        (
            method.task.value,
            f"{method.name} (`{method.code}`)",
            method.when,
            method.otherwise or "",
            method.without,
        )
        for method in METHODS
    ]
    return table(("task", "method", "chosen for", "where it finds nothing", "without it"), rows)


def schedules_table() -> str:
    """What each schedule that the trainer carries out needs of a job."""
    rows = []
    for name, kind in SCHEDULES.builtin.items():
        if kind.trained:
            open_ = f"`stagesPerRank`, else {DEFAULT_STAGES_PER_RANK}"
            stages = open_ if kind.stages_per_rank is None else str(kind.stages_per_rank)
            rows.append(
                (
                    f"`{name}`",
                    kind.summary,
                    stages,
                    "no" if kind.asynchronous else "yes",
                    "equal rounds" if kind.equal_rounds else "any",
                    "yes" if kind.build_replicated is not None else "no",
                )
            )
    return table(("schedule", "meaning", "stages a rank", "flush", "microbatches", "replicas"), rows)


def balancers_table() -> str:
    """What each balancer can take in."""
    rows = [
        (
            f"`{name}`",
            row.summary,
            ", ".join(sorted(row.schedules)) if row.schedules else "all",
            "yes" if row.balances_parameters else "no",
            "yes" if row.limits_memory else "no",
            "yes" if row.replicas else "no",
        )
        for name, row in BALANCERS.builtin.items()
    ]
    return table(("balancer", "meaning", "schedules", "`by: parameters`", "`memoryBytes`", "replicas"), rows)


def dynamics_table() -> str:
    """What each kind of change needs of a model and a job."""
    rows = [
        (
            f"`{name}`",
            case.summary,
            ", ".join(sorted(case.families)) or "all",
            "no" if case.inside_layers else "yes",
            "no" if case.compares_ranks else "yes",
            ", ".join(f"`{other}`" for other in sorted(case.excludes)),
        )
        for name, case in DYNAMICS.builtin.items()
    ]
    return table(("kind", "meaning", "models", "`parallelism.tensor`", "replicas", "not with"), rows)


def planners_table() -> str:
    """What each planner plans."""
    rows = [
        (
            f"`{name}`",
            row.summary,
            "yes" if row.simulates else "no",
        )
        for name, row in PLANNERS.builtin.items()
    ]
    return table(("planner", "plans", "`--sweep`, `--trace`, `--csv`, SVG"), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown; a bar in a cell would end it."""
    columns = tuple(head)
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)
