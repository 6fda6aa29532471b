"""A round: which gangs run where until the next.

Gangs on more nodes than would hold them are brought together, where that is worth a restart. A gang that
starts gets as few nodes as are free (:mod:`.ledger`); where no node had as much room, or it has grown onto
others, it is spread, and maybe slower. It keeps its nodes while its grant is extended. At the end of a round
it moves to fewer nodes of its pool that are free, if its speeds are known to differ by enough.

Two jobs of one GPU each may be on the same GPU, where its node offers it to two pods. The policy shares out
whole GPUs, and the round gives each of them to one job, the first. Then jobs that would wait are put beside
first jobs, where both agree, the GPU has memory for both, and together they do more than they would by turns.
A second job has no claim to the GPU: it continues beside whichever job the round gives the GPU to, if the two
suit each other, and alone where no job is given it. What it receives counts by its speed there, so that it is
no less urgent than the time that it has lost makes it.
"""

import dataclasses
from collections import Counter

from ballast_policies.rounds.draft import Draft, Reason
from ballast_policies.rounds.gangs import SpreadGang
from ballast_policies.rounds.ledger import Ledger, pack
from ballast_policies.rounds.memory import moves_left, within_min_run
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
    beside others (:func:`share_gpus`).
    """
    running = question.state.running
    unable = frozenset(
        job.name
        for job in question.jobs
        if job.name in running and job.throughput.get(running[job.name].gpu_type, 0.0) <= 0
    )
    question = dataclasses.replace(question, shared=dataclasses.replace(question.shared, unable=unable))
    # Jobs that share a GPU may have been allowed other sizes, or several pools, since.
    paired = {name for pair in question.second_jobs.items() for name in pair}
    question = dataclasses.replace(
        question,
        elastic={name: gang for name, gang in question.elastic.items() if name not in paired},
        mixed={name: gang for name, gang in question.mixed.items() if name not in paired},
    )
    limits = question.spot.limits
    decided = within_spot_limits(_without_limits, question) if limits else _without_limits(question)
    return (share_gpus(decided) if question.shared.memory else decided).round()


def _without_limits(question: Question) -> Draft:
    decided = grant_multi_pool(question)
    return consolidate(decided, moves_left(question) - decided.changes.disturbed)


LEAST_GAIN = 0.05
"""A gang moves where it becomes faster by at least this fraction, its restart included."""


def consolidate(decided: Draft, moves: int) -> Draft:
    """The round, with spread gangs on the fewest nodes of their pools where these are free and it pays.

    Each keeps its size and pool, and nothing that another gang has or leaves is taken. Within a round, and
    before a gang has trained for ``min_run_seconds``, it stays; so it does once the hour's moves are used up.
    It is expected to stay as long as it has been where it is, at least a round.

    ``moves``: running gangs that may still be moved within the hour.
    """
    question = decided.question
    spread, state, settings = question.spread, question.state, question.settings
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
        ran = question.ran(name)
        won = gang.speed_after_restart(max(settings.round_seconds, ran))
        if len(placements) >= moves or not question.may_stop(name) or won < gang.speed * (1 + LEAST_GAIN):
            continue
        asks = question.asks_of(name)
        ledger.undo(at.nodes)
        members = [
            node
            for node in asks.open(ledger.pools[at.pool])
            if not node.provisionable and ledger.left[node.name] > 0
        ]
        chosen = pack(len(at.nodes), members, ledger.left, asks.per_pod, asks.topology)
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


def share_gpus(decided: Draft) -> Draft:
    """The round with pairs that do less than by turns parted, and jobs that would wait beside others.

    Pairs part while the hour has moves for it, not within a round, and not before both have run
    ``min_run_seconds``. Of jobs that would wait those are first that are owed the most time.
    """
    question, shared, placements = decided.question, decided.question.shared, decided.placements
    running, seconds, reasons = question.state.running, dict(decided.seconds), {**decided.reasons}
    left, pinned = moves_left(question) - decided.changes.disturbed, within_min_run(question, running)
    first_on = shared.first_jobs(placements)
    for name in sorted(running.keys() & {*shared.jobs, *seconds} & (reasons.keys() - placements.keys())):
        if first := first_on.get(shared.on(running[name])):
            why = shared.why_apart(name, first, running[name])
            if why and name in seconds and name not in pinned and left > 0:
                left -= 1
                del seconds[name]
            if why and name not in seconds:
                reasons[name] = reasons[name].noted(why)
    taken = {shared.on(at) for at in seconds.values()}
    taints = {node.name: node.taints for node in question.nodes if not node.closed and node.name not in taken}
    alone = {node: first for node, first in sorted(first_on.items()) if node in taints}
    placed = {**placements, **seconds, **decided.blocked_by_spot_limit}
    waiting = [job for job in question.jobs if job.name in shared.jobs and job.name not in placed]
    for job in sorted(waiting, key=lambda job: -_owed(question, job.name)):
        barred, was = question.asks_of(job.name).barred, shared.on(running.get(job.name))
        together = {
            node: shared.pair_speed(job.name, first, at.gpu_type)
            for node, first in alone.items()
            if node != was and taints[node] not in barred
            if job.throughput.get((at := placements[first]).gpu_type, 0.0) > 0
            if shared.may_begin(job.name, first, at)
        }
        if together:
            node = max(together, key=lambda node: together[node])
            seconds[job.name] = placements[alone.pop(node)]
    return dataclasses.replace(decided, seconds=seconds, reasons=reasons)


def _owed(question: Question, name: str) -> float:
    """Seconds that the job was promised and has not received."""
    promised = (question.state.promised or {}).get(name, {})
    return sum(promised.values()) - sum(question.state.received.get(name, {}).values())
