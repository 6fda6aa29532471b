"""Findings of ``preemptions.py`` so far, summed up over its parts."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Part:
    """Findings so far, over all parts.

    Attributes:
        taken: how machines were taken -> how often.
        jobs: job -> its counts, summed up.
        steps: job -> the step that it has saved.
        paid: bill, what jobs have paid, idle; summed up.
        parts: clusters that there were.
        done: all preemptions were played, and the jobs were told to end.
        succeeded: whether they have.
    """

    taken: Counter[str] = dataclasses.field(default_factory=Counter)
    jobs: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)
    paid: dict[str, float] = dataclasses.field(default_factory=dict)
    parts: int = 0
    done: bool = False
    succeeded: bool = False

    @classmethod
    def read(cls, file: Path) -> "Part":
        """Part as it was written; the first part begins with nothing."""
        if not file.exists():
            return cls()
        known = json.loads(file.read_text())
        return cls(
            taken=Counter(known["taken"]),
            jobs={name: Counter(counts) for name, counts in known["jobs"].items()},
            steps=known["steps"],
            paid=known["paid"],
            parts=known["parts"],
            done=known["done"],
            succeeded=known["succeeded"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Values as they are written."""
        jobs = {name: dict(counts) for name, counts in self.jobs.items()}
        return {**vars(self), "taken": dict(self.taken), "jobs": jobs}

    @property
    def number(self) -> int:
        """Preemptions so far; "not left in time" is one of a notice."""
        return sum(count for how, count in self.taken.items() if how != "not left in time")

    def add_job(self, name: str, status: dict[str, Any], first_step: int | None) -> None:
        """Add what a part's status says; ``first_step``: the first that was reported, None: none was."""
        counts = self.jobs.setdefault(name, Counter())
        counts["launches"] += status.get("launches") or 0
        counts["live_shrinks"] += sum(entry["asked"] for entry in status.get("repacks") or [])
        saved = self.steps.get(name, 0)
        again = 0 if first_step is None else max(0, saved - first_step)
        counts["steps_lost"] += status.get("lostSteps", 0) + again
        for cause, times in (status.get("restarts") or {}).items():
            counts[f"restarts.{cause}"] += times
        self.steps[name] = max(saved, (status.get("progress") or {}).get("step") or 0)

    def figures(self) -> dict[str, Any]:
        """Figures to print."""
        return {
            "preemptions": dict(self.taken),
            "parts": self.parts,
            "all_jobs_succeeded": self.succeeded,
            "jobs": {
                name: {
                    "launches": counts["launches"],
                    "restarts": {
                        cause.partition(".")[2]: times
                        for cause, times in sorted(counts.items())
                        if cause.startswith("restarts.")
                    },
                    "live_shrinks": counts["live_shrinks"],
                    "steps_lost": counts["steps_lost"],
                }
                for name, counts in self.jobs.items()
            },
            "bill": self.paid.get("bill", 0.0),
            "jobs_cost": self.paid.get("jobs", 0.0),
            "idle": self.paid.get("idle", 0.0),
            "unaccounted": self.paid.get("bill", 0.0)
            - self.paid.get("jobs", 0.0)
            - self.paid.get("idle", 0.0),
        }
