"""Memory from round to round: time promised and received, moves, and whom a round must not disturb.

The account of promised and received time lets no job starve while shares keep changing. Every decision of the
operator takes the memory of the last one and returns the next; it is a value, so that it can be stored with
the policy and read back after a restart.

Changes of a gang's size are remembered, too: from the GPUs that it holds to those that a round gives it.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from ballast_policies.allocation.price_classes import by_type
from ballast_policies.rounds.claims import Claims
from ballast_policies.rounds.ledger import Ledger, in_its_pools
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Placement, Round, RoundState

HOUR = 3600.0

_Rows = Mapping[str, Mapping[str, float]]
"""Job -> GPU type or column -> seconds, or a share."""


def within_min_run(question: Question, gangs: Iterable[str]) -> dict[str, str]:
    """Gangs of these that must stay, all of them within a round -> why.

    So does one that starts: stopped before its first step again and again, it would never train.
    The first of two jobs on one GPU stays as long as the second must.
    """
    if question.settings.within_round:
        return dict.fromkeys(gangs, "holds them until the round ends")
    pinned, second_of = {}, {first: second for second, first in question.second_jobs.items()}
    for job in gangs:
        young = min(job, second_of.get(job, job), key=question.trained)
        if not question.may_stop(young):
            who = "" if young == job else f"shares its GPU with {young}, which "
            trained, least = question.trained(young), question.settings.min_run_seconds
            lacks = f"has trained {trained:.0f} s, less than moves.minRunSeconds={least:.0f}"
            pinned[job] = who + ("has not done its first step yet" if trained <= 0 else lacks)
    return pinned


def moves_left(question: Question) -> int:
    """Running gangs that may still be stopped or moved in this hour; all of them where there is no limit."""
    most = question.settings.max_moves_per_hour
    if most is None:
        return len(question.state.running)
    return max(0, most - len(recent_moves(question.state.moves, question.now)))


def recent_moves(moves: tuple[float, ...], now: float) -> tuple[float, ...]:
    """Moves (times, seconds) within an hour of ``now``; a clock that was set back has older ones after it."""
    return tuple(at for at in moves if abs(now - at) < HOUR)


def keeps_free(question: Question) -> bool:
    """True if GPUs that come free are kept for a gang that waits for gangs that must not be disturbed.

    Not needed within a round whose end may stop all of them: the gang gets its GPUs there.
    """
    settings, running = question.settings, question.state.running
    every_gang_may_be_stopped = (
        settings.min_run_seconds <= 0
        and moves_left(question) >= len(running)
        and all(question.trained(job) >= 0 for job in running)
    )
    return not settings.within_round or not every_gang_may_be_stopped


def exempt_newest(
    disturbed: Mapping[str, Placement], state: RoundState, limit: int, reason: str
) -> dict[str, str]:
    """The ``disturbed`` gangs but for ``limit`` -> why they keep their GPUs.

    Exempt are those that have run the shortest time: stopping them would waste most of their start.
    """
    newest = sorted(disturbed, key=lambda job: (-state.running_since.get(job, 0.0), job))
    return dict.fromkeys(newest[: len(disturbed) - limit], reason)


def reserved_columns(
    claims: Claims, granted: np.ndarray, unhindered: np.ndarray, columns: Mapping[int, Iterable[int]]
) -> dict[int, int]:
    """Columns in which nothing may start this round -> position of the claim that they are kept for.

    A gang that would run now if the protected gangs could be stopped would wait indefinitely if every
    GPU that comes free were given to a smaller one. So the most urgent such claim of a column
    reserves what is free there; gangs that run there continue.

    Args:
        claims: in order of urgency.
        granted: positions of the granted ones.
        unhindered: positions that would be granted if every running gang could be stopped.
        columns: job with a claim on several columns -> those of which it would be granted GPUs.
    """
    running = set(claims.job[granted].tolist())
    closed: dict[int, int] = {}
    for position in unhindered.tolist():
        job = int(claims.job[position])
        if job not in running:
            for column in columns.get(job, (int(claims.column[position]),)):
                closed.setdefault(column, position)
    return closed


def valid_placements(question: Question) -> dict[str, Placement]:
    """Running gangs that could continue where they are: same size and pool, usable type, nodes large enough.

    Where a node has lost GPUs, the gangs that began first stay.
    """
    state, jobs = question.state, {job.name: job for job in question.jobs}
    ledger = Ledger(question.nodes)
    valid = {}
    for name in sorted(state.running, key=state.by_age):
        placement, job = state.running[name], jobs.get(name)
        if job is None or any(part.gpu_type not in job.throughput for part in placement.by_pool):
            continue
        # A type that alone is of no use, or not planned yet, may be of use in a part of a gang.
        alone = not placement.parts
        if alone and (job.gpus != len(placement.nodes) or job.throughput[placement.gpu_type] <= 0):
            continue
        if in_its_pools(placement, ledger.nodes) and ledger.grant(placement.nodes):
            valid[name] = placement
    return valid


HALF_LIFE_ROUNDS = 10.0
"""Rounds of running after which half of what a job was promised and received is forgotten, so that the
account states what is owed now and a long history does not delay the reaction to new shares. Nothing is
forgotten while a job waits: otherwise what is owed to a large gang would stop growing, and a stream of small
jobs, each with a larger share, would stay more urgent indefinitely."""


def forgetting(seconds: float, round_seconds: float) -> float:
    """Part of an account that is left after ``seconds``."""
    return float(0.5 ** (seconds / (HALF_LIFE_ROUNDS * round_seconds)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundMemory:
    """Time promised and received until ``at``, the shares in force since then, and recent moves.

    Attributes:
        promised, received: job -> column -> seconds, as of :class:`RoundState`.
        shares: job -> column -> fraction of time, in force since ``at``.
        at: time of the last decision, seconds.
        moves: times at which running gangs were stopped or moved.
        gpu_types: column -> GPU type, for columns that are not GPU types (pools of different price).
    """

    promised: _Rows = dataclasses.field(default_factory=dict)
    received: _Rows = dataclasses.field(default_factory=dict)
    shares: _Rows = dataclasses.field(default_factory=dict)
    at: float = 0.0
    moves: tuple[float, ...] = ()
    gpu_types: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_running(
        cls,
        running: Mapping[str, Placement],
        running_since: Mapping[str, float],
        shares: Mapping[str, Mapping[str, float]],
        *,
        now: float,
        columns: Mapping[str, str] | None = None,
    ) -> "RoundMemory":
        """Memory rebuilt from the present gangs: how long they have run, at today's shares.

        ``columns``: pool -> column, where it is not the GPU type.
        """
        ran = {job: max(0.0, now - since) for job, since in running_since.items()}
        longest = max(ran.values(), default=0.0)
        return cls(
            promised={job: {t: share * longest for t, share in row.items()} for job, row in shares.items()},
            received={
                job: {column: part * seconds for column, part in _columns(running[job], columns).items()}
                for job, seconds in ran.items()
            },
            shares=shares,
            at=now,
        )

    def until(
        self,
        now: float,
        shares: Mapping[str, Mapping[str, float]],
        *,
        running: Mapping[str, Placement],
        round_seconds: float,
        columns: Mapping[str, str] | None = None,
        speeds: Mapping[str, float] | None = None,
    ) -> "RoundMemory":
        """The memory at ``now``, when ``shares`` come into force; ``running`` ran since the last decision.

        Jobs without a share until now are closed; of those that did not run nothing is forgotten.

        ``speeds``: job -> speed over that alone, of jobs that share a GPU: so much of the time they receive.
        """
        promised, received, seconds = {}, {}, max(0.0, now - self.at)
        for job, row in self.shares.items():
            kept = forgetting(seconds, round_seconds) if job in running else 1.0
            was = self.promised.get(job, {})
            promised[job] = {t: was.get(t, 0.0) * kept + x * seconds for t, x in row.items()}
            had = {t: s * kept for t, s in self.received.get(job, {}).items()}
            if job in running:
                for column, part in _columns(running[job], columns, (speeds or {}).get(job, 1.0)).items():
                    had[column] = had.get(column, 0.0) + part * seconds
            received[job] = had
        return dataclasses.replace(self, promised=promised, received=received, shares=shares, at=now)

    def of_jobs(self, jobs: Collection[str]) -> "RoundMemory":
        """The memory of these jobs only."""
        return self._each(lambda rows: {job: row for job, row in rows.items() if job in jobs})

    def _each(self, change: Callable[[_Rows], _Rows]) -> "RoundMemory":
        """The memory with its rows changed, what was promised and received and the shares alike."""
        promised, received = change(self.promised), change(self.received)
        return dataclasses.replace(self, promised=promised, received=received, shares=change(self.shares))

    def with_moves(self, decided: Round, now: float) -> "RoundMemory":
        """The memory after ``decided`` was carried out at ``now``; moves older than an hour are dropped."""
        return dataclasses.replace(self, moves=(*recent_moves(self.moves, now), *([now] * decided.disturbed)))

    def over_columns(self, gpu_types: Mapping[str, str], gpus: Mapping[str, int]) -> "RoundMemory":
        """The memory over other columns, e.g. when prices or the policy have changed.

        A job's seconds and shares on each GPU type stay the same in total; they are divided over the type's
        columns by the GPUs of each.

        ``gpu_types``: column -> GPU type, of all from now on; ``gpus``: column -> GPUs.
        """
        own = {column: kind for column, kind in gpu_types.items() if column != kind}
        if own == self.gpu_types:
            return self
        columns: dict[str, list[str]] = {}
        for column, kind in gpu_types.items():
            columns.setdefault(kind, []).append(column)
        found = self._each(lambda rows: {job: self._divided(row, columns, gpus) for job, row in rows.items()})
        return dataclasses.replace(found, gpu_types=own)

    def _divided(
        self, row: Mapping[str, float], columns: Mapping[str, list[str]], gpus: Mapping[str, int]
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for kind, value in by_type(row.items(), self.gpu_types).items():
            names = columns.get(kind, [kind])
            total = sum(gpus.get(name, 0) for name in names)
            for name in names:
                part = gpus.get(name, 0) / total if total else 1 / len(names)
                found[name] = value * part
        return found


def _columns(placement: Placement, columns: Mapping[str, str] | None, speed: float = 1.0) -> dict[str, float]:
    """Column -> part of the gang's GPUs that are of it; they are ``speed`` together."""
    found: dict[str, float] = {}
    for part in placement.by_pool:
        column = (columns or {}).get(part.pool, part.gpu_type)
        share = part.gpus / len(placement.nodes) if placement.parts else 1.0
        found[column] = found.get(column, 0.0) + share * speed
    return found


SETTLING_SECONDS = 5.0
"""Least time from a change of a gang's size to its next growth."""

SETTLING_PAUSES = 20.0
"""The same, in pauses of such a change: growing costs no more than a twentieth of the time."""

FAILED_GROWTH_SECONDS = 60.0
"""Time from a growth that was given up to the next try; it doubles with each that fails after it."""

LONGEST_PAUSE_SECONDS = 600.0
"""Longest pause before a growth, whatever came before it."""


def resize_cooldown_seconds(pause_seconds: float, failed: int = 0) -> float:
    """Seconds from a change of a gang's size to its next growth.

    Args:
        pause_seconds: how long training stands still for such a change.
        failed: growths that were given up since the last one that succeeded.
    """
    if failed:
        seconds = FAILED_GROWTH_SECONDS * 2.0 ** min(failed - 1, 10)
    else:
        seconds = max(SETTLING_SECONDS, SETTLING_PAUSES * pause_seconds)
    return min(seconds, LONGEST_PAUSE_SECONDS)
