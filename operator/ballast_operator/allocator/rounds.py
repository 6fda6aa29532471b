"""When the rounds of a policy begin, and what is remembered between them."""

import dataclasses
import logging
from collections.abc import Mapping

from ballast_policies.allocation.price_classes import PriceClasses
from ballast_policies.allocation.problem import Allocation
from ballast_policies.allocation.registry import find_policy
from ballast_policies.rounds import (
    Question,
    Round,
    RoundMemory,
    RoundSettings,
    RoundState,
    SizeSettings,
    decide_round,
)

from ballast_operator.allocator.costs.spot_limits import spot_limits
from ballast_operator.allocator.pending_grants import EffectivePlacements, PendingGrants
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.cluster_policy import ClusterPolicy

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProposedRound:
    """A decision that has not changed anything yet.

    Attributes:
        round_: the decision.
        plan_id: its name.
        next_at: when the round ends, epoch seconds.
        memory: for the next decision.
    """

    round_: Round
    plan_id: str
    next_at: float
    memory: RoundMemory


class Rounds:
    """Decides the rounds of one policy.

    Attributes:
        next_at: when the round ends, in epoch seconds; None before the first decision.
        plan_id: name of the last decision.
        memory: of the last decision; None before the first.
    """

    def __init__(self) -> None:
        self.next_at: float | None = None
        self.plan_id = ""
        self.memory: RoundMemory | None = None
        self._number = 0
        self._grants = PendingGrants()

    def decide(
        self,
        policy: ClusterPolicy,
        snapshot: Snapshot,
        allocation: Allocation,
        *,
        classes: PriceClasses | None = None,
        parts: Mapping[str, float] | None = None,
        moment: float,
    ) -> Round:
        """The decision at ``moment``, kept."""
        proposed = self.propose(policy, snapshot, allocation, classes=classes, parts=parts, moment=moment)
        self.keep(proposed, snapshot)
        return proposed.round_

    def propose(
        self,
        policy: ClusterPolicy,
        snapshot: Snapshot,
        allocation: Allocation,
        *,
        classes: PriceClasses | None = None,
        parts: Mapping[str, float] | None = None,
        moment: float,
    ) -> ProposedRound:
        """The decision at ``moment`` (epoch seconds), at the start of a round or within one.

        Nothing is remembered of it until it is kept: an error in it leaves all as it was.

        ``classes``: the columns of ``allocation``; None: GPU types. ``parts``: job -> part of the cluster
        that it has a claim to; None: by its weight.
        """
        classes = classes or PriceClasses()
        length = float(policy.spec.round_seconds)
        memory = self._remember(snapshot, allocation, classes, moment, length)
        # A fresh operator starts in the middle of a round: its start alone moves no gang.
        at_boundary = self.next_at is not None and moment >= self.next_at
        next_at = moment + length if self.next_at is None else self.next_at
        if at_boundary:
            # On the grid: a decision that comes late does not delay the rounds after it.
            next_at += length * (1 + (moment - next_at) // length)
        next_at = min(next_at, moment + length)  # roundSeconds may have been lowered since
        effective = EffectivePlacements(running=snapshot.running, since=snapshot.running_since)
        if not at_boundary:
            effective = self._grants.effective_placements(snapshot, moment=moment)
        question = Question(
            nodes=snapshot.capacity.nodes,
            now=moment,
            shares=allocation.allocation,
            jobs=snapshot.problem.jobs,
            state=RoundState(
                received=memory.account.received,
                promised=memory.account.promised,
                running=effective.running,
                running_since=effective.since,
                moves=memory.moves,
            ),
            settings=RoundSettings(
                round_seconds=length,
                min_run_seconds=policy.spec.moves.min_run_seconds,
                max_moves_per_hour=policy.spec.moves.max_moves_per_hour,
                within_round=not at_boundary,
            ),
            elastic=snapshot.elastic,
            mixed=snapshot.mixed,
            spread=snapshot.spread,
            shared=snapshot.shared,
            spot=spot_limits(policy.spec, snapshot.capacity.kinds),
            sizes=SizeSettings(surplus=find_policy(policy.spec.objective.policy).surplus),
            tenants={job.name: job.key[0] for job in snapshot.jobs if job.key[0] in snapshot.tenants.gpus},
            room=snapshot.tenants.gpus,
            pending=effective.pending,
            not_tolerated=snapshot.not_tolerated,
            gpus_per_pod=snapshot.gpus_per_pod,
            columns=classes.of_pool,
            parts=parts,
        )

        decided = decide_round(question)
        if not at_boundary:
            decided = self._grants.explain(decided)
        return ProposedRound(
            round_=decided,
            plan_id=f"{policy.metadata.name}-{int(moment)}-{self._number + 1}",
            next_at=next_at,
            memory=memory if policy.spec.dry_run else memory.with_moves(decided, moment),
        )

    def keep(self, proposed: ProposedRound, snapshot: Snapshot) -> None:
        """Remember what was proposed for ``snapshot``."""
        decided = proposed.round_
        self._grants.remember(decided, snapshot)
        self.memory, self.next_at, self.plan_id = proposed.memory, proposed.next_at, proposed.plan_id
        self._number += 1
        logger.info(
            "round planId=%s extended=%d resized=%d started=%d moved=%d stopped=%d waiting=%d",
            self.plan_id,
            len(decided.extended),
            len(decided.resized),
            len(decided.started),
            len(decided.moved),
            len(decided.stopped),
            len(decided.waiting),
        )

    def _remember(
        self,
        snapshot: Snapshot,
        allocation: Allocation,
        classes: PriceClasses,
        moment: float,
        length: float,
    ) -> RoundMemory:
        shares, running = allocation.allocation, snapshot.running
        if self.memory is None:
            fresh = RoundMemory.from_running(
                running, snapshot.running_since, shares, now=moment, columns=classes.of_pool
            )
            return dataclasses.replace(fresh, gpu_types=classes.split_columns)
        known = self.memory.over_columns(classes.gpu_type, classes.gpus)
        return known.until(
            moment,
            shares,
            running=running,
            round_seconds=length,
            columns=classes.of_pool,
            speeds={job.name: job.beside_speed for job in snapshot.jobs if job.beside_speed != 1.0},
        )
