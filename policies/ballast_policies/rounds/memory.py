"""What is remembered from round to round: time promised and received, and recent moves.

Every decision of the operator takes the memory of the last one and returns the next; it is a value, so that
it can be stored with the policy and read back after a restart.
"""

import dataclasses
from collections.abc import Mapping

from ballast_policies.rounds.account import Account, advance
from ballast_policies.rounds.hysteresis import recent_moves
from ballast_policies.rounds.values import Placement, Round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundMemory:
    """Time promised and received until ``at``, the shares in force since then, and recent moves.

    Attributes:
        account: seconds promised to and received by each job.
        shares: job -> GPU type -> fraction of time, in force since ``at``.
        at: time of the last decision, seconds.
        moves: times at which running gangs were stopped or moved.
    """

    account: Account
    shares: Mapping[str, Mapping[str, float]]
    at: float
    moves: tuple[float, ...] = ()

    @classmethod
    def from_running(
        cls,
        running: Mapping[str, Placement],
        running_since: Mapping[str, float],
        shares: Mapping[str, Mapping[str, float]],
        *,
        now: float,
    ) -> "RoundMemory":
        """What can be known without a memory: how long the present gangs have run, at today's shares."""
        ran = {job: max(0.0, now - since) for job, since in running_since.items()}
        longest = max(ran.values(), default=0.0)
        account = Account(
            promised={job: {t: share * longest for t, share in row.items()} for job, row in shares.items()},
            received={job: {running[job].gpu_type: seconds} for job, seconds in ran.items()},
        )
        return cls(account=account, shares=shares, at=now)

    def until(
        self,
        now: float,
        shares: Mapping[str, Mapping[str, float]],
        *,
        running: Mapping[str, Placement],
        round_seconds: float,
    ) -> "RoundMemory":
        """The memory at ``now``, when ``shares`` come into force; ``running`` ran since the last decision."""
        account = advance(
            self.account,
            shares=self.shares,
            running={job: placement.gpu_type for job, placement in running.items()},
            seconds=max(0.0, now - self.at),
            round_seconds=round_seconds,
        )
        return dataclasses.replace(self, account=account, shares=shares, at=now)

    def with_moves(self, decided: Round, now: float) -> "RoundMemory":
        """The memory after ``decided`` was carried out at ``now``; moves older than an hour are dropped."""
        disturbed = len(decided.moved) + len(decided.stopped)
        return dataclasses.replace(self, moves=(*recent_moves(self.moves, now), *([now] * disturbed)))
