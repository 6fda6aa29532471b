"""The allocator's memory from round to round: what was promised, what was received, when the next is due."""

import logging
from collections.abc import Mapping

from ballast_policies.allocation.problem import Allocation
from ballast_policies.rounds import (
    Account,
    Round,
    RoundSettings,
    RoundState,
    advance,
    decide_round,
)

from ballast_operator.allocator.grants import Grants, Standing
from ballast_operator.allocator.snapshot import Snapshot
from ballast_operator.api.cluster_policy import ClusterPolicy

logger = logging.getLogger(__name__)

HOUR = 3600.0


class Rounds:
    """Decides rounds of one policy. In memory only: a fresh operator knows of the present gangs and no more.

    Attributes:
        next_at: when the round ends, in epoch seconds; None before the first decision.
        plan_id: name of the last decision.
    """

    def __init__(self) -> None:
        self.next_at: float | None = None
        self.plan_id = ""
        self._account: Account | None = None
        self._shares: Mapping[str, Mapping[str, float]] = {}
        self._accounted_at = 0.0
        self._moves: tuple[float, ...] = ()
        self._number = 0
        self._grants = Grants()

    def decide(
        self, policy: ClusterPolicy, snapshot: Snapshot, allocation: Allocation, *, moment: float
    ) -> Round:
        """The decision at ``moment`` (epoch seconds): a round's, or one in its middle."""
        length = float(policy.spec.round_seconds)
        account = self._balance(snapshot, allocation, moment, length)
        # A fresh operator starts in the middle of a round: its start alone moves nobody.
        at_boundary = self.next_at is not None and moment >= self.next_at
        if self.next_at is None:
            self.next_at = moment + length
        elif at_boundary:
            # On the grid: a decision that comes late does not put off the rounds after it.
            self.next_at += length * (1 + (moment - self.next_at) // length)
        self.next_at = min(self.next_at, moment + length)  # roundSeconds may have been lowered since
        least = policy.spec.moves.min_run_seconds
        standing = Standing(running=snapshot.running, since=snapshot.running_since)
        if not at_boundary:
            standing = self._grants.standing(snapshot, moment=moment)
        decided = decide_round(
            now=moment,
            allocation=allocation,
            gangs=snapshot.gangs,
            nodes=snapshot.nodes,
            state=RoundState(
                received=account.received,
                promised=account.promised,
                running=standing.running,
                running_since=standing.since,
                moves=self._moves,
            ),
            settings=RoundSettings(
                round_seconds=length,
                min_run_seconds=least,
                max_moves_per_hour=policy.spec.moves.max_moves_per_hour,
                within_round=not at_boundary,
                # What comes free within a round need not wait for its end, if that may stop whom it likes.
                keep_free=at_boundary or least > 0 or self._scarce_moves(policy, snapshot, moment),
            ),
        )
        if not at_boundary:
            decided = self._grants.explain(decided)
        self._grants.remember(decided, snapshot)
        disturbed = len(decided.moved) + len(decided.stopped)
        if disturbed and not policy.spec.dry_run:
            recent = tuple(at for at in self._moves if moment - at < HOUR)
            self._moves = (*recent, *([moment] * disturbed))
        self._number += 1
        self.plan_id = f"{policy.metadata.name}-{int(moment)}-{self._number}"
        logger.info(
            "round planId=%s extended=%d started=%d moved=%d stopped=%d waiting=%d",
            self.plan_id,
            len(decided.extended),
            len(decided.started),
            len(decided.moved),
            len(decided.stopped),
            len(decided.waiting),
        )
        return decided

    def _scarce_moves(self, policy: ClusterPolicy, snapshot: Snapshot, moment: float) -> bool:
        """Whether ``maxMovesPerHour`` may keep the round's end from stopping some of the running gangs."""
        recent = sum(1 for at in self._moves if moment - at < HOUR)
        return recent + len(snapshot.running) > policy.spec.moves.max_moves_per_hour

    def _balance(self, snapshot: Snapshot, allocation: Allocation, moment: float, length: float) -> Account:
        if self._account is None:
            account = fresh_account(snapshot, allocation, moment)
        else:
            account = advance(
                self._account,
                shares=self._shares,
                running={name: placement.gpu_type for name, placement in snapshot.running.items()},
                seconds=max(0.0, moment - self._accounted_at),
                round_seconds=length,
            )
        self._account, self._accounted_at, self._shares = account, moment, allocation.allocation
        return account


def fresh_account(snapshot: Snapshot, allocation: Allocation, moment: float) -> Account:
    """What a fresh operator can know: how long the present gangs have run, as if shares had been as now."""
    ran = {name: max(0.0, moment - since) for name, since in snapshot.running_since.items()}
    longest = max(ran.values(), default=0.0)
    return Account(
        promised={
            name: {gpu_type: share * longest for gpu_type, share in row.items()}
            for name, row in allocation.allocation.items()
        },
        received={name: {snapshot.running[name].gpu_type: seconds} for name, seconds in ran.items()},
    )
