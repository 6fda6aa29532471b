"""The allocator's memory from round to round: what was promised, what was received, when the next is due."""

import logging
from collections.abc import Mapping

from ballast_policies.allocation.problem import Allocation
from ballast_policies.allocation.rounds import (
    Account,
    Round,
    RoundSettings,
    RoundState,
    advance,
    decide_round,
)

from ballast_operator.allocator.snapshot import Snapshot
from ballast_operator.api.cluster_policy import ClusterPolicy

logger = logging.getLogger(__name__)


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

    def decide(
        self, policy: ClusterPolicy, snapshot: Snapshot, allocation: Allocation, *, moment: float
    ) -> Round:
        """The decision at ``moment`` (epoch seconds): a round's, or one in its middle."""
        length = float(policy.spec.round_seconds)
        account = self._balance(snapshot, allocation, moment, length)
        # A fresh operator starts in the middle of a round: its start alone moves nobody.
        at_boundary = self.next_at is not None and moment >= self.next_at
        if at_boundary or self.next_at is None:
            self.next_at = moment + length
        self.next_at = min(self.next_at, moment + length)  # roundSeconds may have been lowered since
        least = policy.spec.moves.min_run_seconds
        decided = decide_round(
            now=moment,
            allocation=allocation,
            gangs=snapshot.gangs,
            nodes=snapshot.nodes,
            state=RoundState(
                received=account.received,
                promised=account.promised,
                running=snapshot.running,
                running_since=snapshot.running_since,
                moves=self._moves,
            ),
            settings=RoundSettings(
                round_seconds=length,
                # Within a round only free GPUs are handed out: a gang keeps its lease for a round.
                min_run_seconds=least if at_boundary else max(least, length),
                max_moves_per_hour=policy.spec.moves.max_moves_per_hour,
            ),
        )
        disturbed = len(decided.moved) + len(decided.stopped)
        if disturbed and not policy.spec.dry_run:
            recent = tuple(at for at in self._moves if moment - at < 3600)
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
