"""A round while it is put together, and what it changes for the jobs."""

import dataclasses
import functools
from collections.abc import Mapping

from ballast_policies.rounds.explanations import Reason
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Colocation, Placement, Round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What becomes of each job, by where it ran and where it is to run; fields as of ``Round``."""

    extended: tuple[str, ...]
    started: tuple[str, ...]
    moved: tuple[str, ...]
    resized: tuple[str, ...]
    stopped: tuple[str, ...]
    waiting: tuple[str, ...]

    @property
    def disturbed(self) -> int:
        """Running gangs that are stopped or moved, which the hour's moves limit."""
        return len(self.moved) + len(self.stopped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A round while it is put together: every pass returns another one.

    Attributes:
        placements: job -> where it is to run.
        reasons: job -> why.
        kept_off_spot: as of ``Round``.
        beside: as of ``Round``.
    """

    question: Question
    placements: Mapping[str, Placement]
    reasons: Mapping[str, Reason]
    kept_off_spot: Mapping[str, str] = dataclasses.field(default_factory=dict)
    beside: Mapping[str, Colocation] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def changes(self) -> Changes:
        """What becomes of the jobs of the question, in their order, and of others that run."""
        found: dict[str, list[str]] = {field.name: [] for field in dataclasses.fields(Changes)}
        ran, names = self.question.state.running, [job.name for job in self.question.jobs]
        for name in (*names, *sorted(ran.keys() - set(names))):
            found[self._change(ran.get(name), self.placements.get(name), name)].append(name)
        found["stopped"].sort()
        return Changes(**{change: tuple(names) for change, names in found.items()})

    def _change(self, was: Placement | None, now: Placement | None, name: str) -> str:
        if now is None:
            return "waiting" if was is None else "stopped"
        if was is None:
            return "started"
        if now == was:
            return "extended"
        if name not in self.question.elastic or was.parts or now.parts or was.pool != now.pool:
            return "moved"
        # At the same size it is elsewhere, though by chance its first ranks are where they were.
        least = self.question.least(name, was)
        changes = len(now.nodes) != len(was.nodes) or name in self.question.pending
        return "resized" if changes and now.nodes[: len(least)] == least else "moved"

    def with_placements(self, placements: Mapping[str, Placement], reasons: Mapping[str, Reason]) -> "Draft":
        """The draft with these jobs there, each for its reason."""
        return dataclasses.replace(
            self,
            placements={**self.placements, **placements},
            reasons={**self.reasons, **reasons},
        )

    def round(self) -> Round:
        """The decision, with its reasons as text."""
        changes = {field.name: getattr(self.changes, field.name) for field in dataclasses.fields(Changes)}
        return Round(
            placements=self.placements,
            reasons={name: why.told(self.placements.get(name)) for name, why in self.reasons.items()},
            kept_off_spot=self.kept_off_spot,
            beside=self.beside,
            **changes,
        )
