"""Which pool an elastic gang runs in, by the size that it would reach there and what a restart costs.

``decide_round`` places gangs at their least sizes. At these, the fastest GPUs look best to all of them,
although a gang may be faster on many slower GPUs than on its part of the fast ones. So

- before the round, a running gang for which no other pool would win enough claims all of its time where it
  is (:func:`claims_where_they_run`): it is not moved by its share at the least size;
- after it, gangs go one at a time to the pool where that wins most in the policy's sense
  (:func:`choose_pools`): those that start at once, those that run where it is worth their restart.
"""

import dataclasses
from collections.abc import Mapping

from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.explanations import Reason
from ballast_policies.rounds.hysteresis import moves_left
from ballast_policies.rounds.packing import in_its_pools
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.sizes.market import Market
from ballast_policies.rounds.values import Placement

MOST_SWEEPS = 4
"""How often the gangs are gone through: one that has moved leaves room for others."""


def claims_where_they_run(cluster: Question, reduced: Mapping[str, Placement]) -> Question:
    """The question in which gangs that are best off where they run have all of their time there."""
    nodes = {node.name: node for node in cluster.nodes}
    state, shares = cluster.state, cluster.shares
    if (
        len({node.pool for node in cluster.nodes}) < 2
        or cluster.settings.within_round
        or cluster.sizes.surplus is Surplus.COST
    ):
        return cluster
    running = {name: at for name, at in state.running.items() if in_its_pools(at, nodes)}
    market = Market(cluster, reduced, running)
    staying = {}
    for name, at in market.movable(running).items():
        column = cluster.columns.get(at.pool, at.gpu_type)
        elsewhere = {other for other, share in shares.get(name, {}).items() if share > 0 and other != column}
        if elsewhere and market.is_best_off(name, at.pool, elsewhere):
            staying[name] = column
    if not staying:
        return cluster
    promised = state.promised
    return dataclasses.replace(
        cluster,
        shares={**shares, **{n: _all_in(shares.get(n, {}), c) for n, c in staying.items()}},
        state=dataclasses.replace(
            state,
            received={
                **state.received,
                **{n: _all_in(state.received.get(n, {}), c) for n, c in staying.items()},
            },
            promised=None
            if promised is None
            else {**promised, **{n: _all_in(promised.get(n, {}), c) for n, c in staying.items()}},
        ),
    )


def _all_in(row: Mapping[str, float], column: str) -> dict[str, float]:
    return {**dict.fromkeys(row, 0.0), column: sum(row.values())}


def choose_pools(cluster: Question, reduced: Mapping[str, Placement], decided: Draft) -> Draft:
    """The round with elastic gangs in the pools where they are worth most; the same gangs run."""
    if len({node.pool for node in cluster.nodes}) < 2:
        return decided
    market, changes = Market(cluster, reduced, decided.placements), decided.changes
    may_start = {
        name: at
        for name, at in decided.placements.items()
        if name in changes.started and name in cluster.elastic and name not in cluster.pending
    }
    may_move = {}
    if not cluster.settings.within_round:
        may_move = market.movable({name: decided.placements[name] for name in changes.extended})
    left = moves_left(cluster) - changes.disturbed
    chosen: dict[str, tuple[Placement, float]] = {}
    for _ in range(MOST_SWEEPS):
        candidates = {**may_start, **may_move} if left > 0 else may_start
        candidates = {name: at for name, at in candidates.items() if name not in chosen}
        before = len(chosen)
        for name, placement, won in market.moves(candidates, frozenset(may_start)):
            chosen[name] = placement, won
            left -= name in may_move
            if left <= 0 and name in may_move:
                break
        if len(chosen) == before or market.exhausted:
            break
    return _with_choices(decided, chosen, cluster) if chosen else decided


def _with_choices(decided: Draft, chosen: Mapping[str, tuple[Placement, float]], cluster: Question) -> Draft:
    placements = {name: placement for name, (placement, _) in chosen.items()}
    running, reasons = set(decided.changes.extended), {}
    for name, (placement, won) in chosen.items():
        before = decided.placements[name]
        restart = ""
        if name in running:
            restart = f" after a restart of {cluster.elastic[name].restart_seconds:.0f} s"
        reasons[name] = Reason(
            f"in pool {placement.pool}: with the sizes that gangs reach, {won:.0%} better by the policy "
            f"than in pool {before.pool}{restart}"
        )
    return decided.with_placements(placements, reasons)
