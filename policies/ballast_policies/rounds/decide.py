"""One round: which gangs run where until the next.

Gangs on more nodes than would hold them are brought together, where that is worth a restart. A gang that
starts gets as few nodes as are free (:mod:`.ledger`); where no node had as much room, or it has grown onto
others, it is spread, and maybe slower. It keeps its nodes while its grant is extended. At the end of a round
it moves to fewer nodes of its pool that are free, if its speeds are known to differ by enough.
"""

import dataclasses
from collections import Counter

from ballast_policies.rounds.colocation import colocate
from ballast_policies.rounds.draft import Draft, Reason
from ballast_policies.rounds.gangs import SpreadGang
from ballast_policies.rounds.hysteresis import moves_left
from ballast_policies.rounds.ledger import Ledger, pack
from ballast_policies.rounds.multi_pool import grant_multi_pool
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.spot_limits import within_spot_limits
from ballast_policies.rounds.values import Placement, Round


def decide_round(question: Question) -> Round:
    """Decide the round that begins at ``question.now``.

    A gang runs whole or not at all; no node is given more GPUs than it has; a running gang whose grant is
    extended keeps exactly its nodes. The same question gives the same round.

    Whole GPUs are granted by the shares (:mod:`.grants`), with sizes of elastic gangs (:mod:`.elastic`) and
    gangs in several pools (:mod:`.multi_pool`); spread gangs are brought together (:func:`consolidate`); what
    this starts on spot machines keeps within their limits (:mod:`.spot_limits`); jobs that would wait are put
    beside others (:mod:`.colocation`).
    """
    return colocate(_on_whole_gpus, question).round()


def _on_whole_gpus(question: Question) -> Draft:
    return within_spot_limits(_without_limits, question)


def _without_limits(question: Question) -> Draft:
    decided = grant_multi_pool(question)
    return consolidate(decided, moves_left(question) - decided.changes.disturbed)


LEAST_GAIN = 0.05
"""A gang moves where it becomes faster by at least this fraction, its restart included."""


def consolidate(decided: Draft, moves: int) -> Draft:
    """The round, with spread gangs on the fewest nodes of their pools where these are free and it pays.

    Each keeps its size and pool, and nothing that another gang has or leaves is taken. Within a round, and
    before a gang has run ``min_run_seconds``, it stays; so it does once the hour's moves are used up. It is
    expected to stay as long as it has been where it is, at least a round.

    Args:
        decided: the round.
        moves: running gangs that may still be moved within the hour.
    """
    question = decided.question
    spread, now, state, settings = question.spread, question.now, question.state, question.settings
    candidates = {
        name: spread[name]
        for name in decided.changes.extended
        if name in spread and spread[name].may_move and spread[name].at == decided.placements[name]
    }
    if settings.within_round or not candidates:
        return decided
    ledger = Ledger(question.nodes, (at.nodes for at in decided.placements.values()))
    for name, was in state.running.items():  # what gangs leave is free only when they have stopped
        if (now_at := decided.placements.get(name)) != was:
            ledger.take((Counter(was.nodes) - Counter(now_at.nodes if now_at else ())).elements())
    placements, reasons = dict[str, Placement](), dict[str, Reason]()
    for name in sorted(candidates, key=lambda name: (-_gain(candidates[name]), name)):
        gang, at = candidates[name], decided.placements[name]
        ran = now - state.running_since.get(name, now)
        won = gang.speed_after_restart(max(settings.round_seconds, ran))
        if len(placements) >= moves or ran < settings.min_run_seconds or won < gang.speed * (1 + LEAST_GAIN):
            continue
        barred = question.not_tolerated.get(name, frozenset())
        ledger.undo(at.nodes)
        members = [
            node
            for node in ledger.pools[at.pool]
            if not (node.closed or node.provisionable or node.group in barred) and ledger.left[node.name] > 0
        ]
        each, asked = question.gpus_per_pod.get(name, 1), question.topology.get(name)
        chosen = pack(len(at.nodes), members, ledger.left, each, asked)
        ledger.take(at.nodes)
        if chosen is None or not len(set(at.nodes)) > gang.fewest >= len(set(chosen)):
            continue
        ledger.take((Counter(chosen) - Counter(at.nodes)).elements())
        placements[name] = dataclasses.replace(at, nodes=chosen)
        reasons[name] = Reason(
            f"moves from {len(set(at.nodes))} nodes to {len(set(chosen))} of pool {at.pool}: "
            f"{gang.packed_speed:.3g} steps/s in place of {gang.speed:.3g}, after a restart of "
            f"{gang.restart_seconds:.0f} s"
        )
    return decided.with_placements(placements, reasons)


def _gain(gang: SpreadGang) -> float:
    return gang.packed_speed / max(gang.speed, 1e-12)
