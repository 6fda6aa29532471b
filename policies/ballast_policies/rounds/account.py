"""The account of promised and received time, which lets no job starve while shares keep changing."""

import dataclasses
from collections.abc import Mapping

HALF_LIFE_ROUNDS = 10.0
"""After this many rounds of running, half of what a job was promised and received is forgotten, so that the
account states what is owed now and a long history does not delay the reaction to new shares. Nothing is
forgotten while a job waits: otherwise what is owed to a large gang would stop growing, and a stream of small
jobs, each with a larger share, would stay more urgent indefinitely."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds by job and GPU type: what the shares promised, and what was received."""

    promised: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    received: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


def advance(
    account: Account,
    *,
    shares: Mapping[str, Mapping[str, float]],
    running: Mapping[str, str | Mapping[str, float]],
    seconds: float,
    round_seconds: float,
) -> Account:
    """The account after ``seconds`` more.

    Args:
        account: until now.
        shares: job -> GPU type -> fraction of time, in force during ``seconds``; jobs that are missing are
            closed.
        running: job -> GPU type on which it ran during ``seconds``, or its GPU types with the part of its
            GPUs that was of each; of the others nothing is forgotten.
        seconds: how long.
        round_seconds: length of a round.
    """
    promised, received = {}, {}
    for job, row in shares.items():
        kept = forgetting(seconds, round_seconds) if job in running else 1.0
        was = account.promised.get(job, {})
        promised[job] = {t: was.get(t, 0.0) * kept + x * seconds for t, x in row.items()}
        had = {t: s * kept for t, s in account.received.get(job, {}).items()}
        if job in running:
            at = running[job]
            for column, part in {at: 1.0}.items() if isinstance(at, str) else at.items():
                had[column] = had.get(column, 0.0) + part * seconds
        received[job] = had
    return Account(promised=promised, received=received)


def forgetting(seconds: float, round_seconds: float) -> float:
    """Which part of an account is left after ``seconds``."""
    return float(0.5 ** (seconds / (HALF_LIFE_ROUNDS * round_seconds)))
