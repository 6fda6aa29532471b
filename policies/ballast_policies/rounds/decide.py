"""One round: which gangs run where until the next.

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
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from ballast_policies.rounds.draft import Draft, Reason
from ballast_policies.rounds.gangs import SharedGpus, SpreadGang
from ballast_policies.rounds.ledger import Ledger, pack
from ballast_policies.rounds.memory import moves_left, recent_moves
from ballast_policies.rounds.multi_pool import grant_multi_pool
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.spot_limits import within_spot_limits
from ballast_policies.rounds.values import Colocation, Placement, Round, RoundSettings, RoundState

LEAST_PAIR_GAIN = 0.05
"""Two jobs begin to share where their speeds over those alone are 1 and this much more together. They
continue while they are at least 1."""

Decide = Callable[[Question], Draft]


def colocate(decide: Decide, question: Question) -> Draft:
    """The round by ``decide``, which gives whole GPUs to first jobs, with second jobs beside them.

    No GPU has more than two jobs. A second job is stopped or moved as rarely as any other: not before it ran
    ``min_run_seconds``, which its first job waits for as well, and within the moves of the hour.
    """
    if not question.shared.memory:
        return decide(question)
    pairing = _Pairs(question)
    now, state, settings = question.now, question.state, question.settings
    left = moves_left(question)
    found = pairing.decide(decide, settings, frozen=left == 0)
    allowed = left
    while allowed and not settings.within_round:
        excess = found.changes.disturbed - left
        if excess <= 0 or not pairing.seconds.keys() & {*found.changes.moved, *found.changes.stopped}:
            return found
        # Second jobs are not known to what counts the moves: it is given fewer.
        allowed = max(0, allowed - excess)
        fewer = len(recent_moves(state.moves, now)) + allowed
        found = pairing.decide(decide, dataclasses.replace(settings, max_moves_per_hour=fewer), frozen=True)
    return found


class _Pairs:
    """Who is beside whom; ``seconds``: running second job -> the first."""

    def __init__(self, question: Question) -> None:
        self.question, self.now, self.state = question, question.now, question.state
        self.jobs = {job.name: job for job in question.jobs}
        self.nodes = {node.name: node for node in question.nodes}
        self.settings, self.shared = question.settings, question.shared
        self.seconds = _second_jobs(question.state, question.shared)

    def decide(self, decide: Decide, settings: RoundSettings, *, frozen: bool) -> Draft:
        """The round; ``frozen``: no second job is offered a GPU of its own."""
        staying = {name for name in self.seconds if frozen or self._must_stay(name)}
        running = {name: at for name, at in self.state.running.items() if name not in self.seconds}
        since = {name: at for name, at in self.state.running_since.items() if name not in self.seconds}
        for second, first in self.seconds.items():
            since[first] = max(since[first], self.state.running_since.get(second, self.now))
        decided = decide(
            dataclasses.replace(
                self.question,
                jobs=[job for job in self.jobs.values() if job.name not in staying],
                state=dataclasses.replace(self.state, running=running, running_since=since),
                settings=settings,
            )
        )
        placements = dict(decided.placements)
        self._keep_nodes(placements)
        beside, ended = self._continue(placements, staying, frozen=frozen)
        self._begin(placements, beside, decided)
        return self._draft(decided, placements, beside, ended)

    def _must_stay(self, name: str) -> bool:
        young = self.question.ran(name) < self.settings.min_run_seconds
        return self.settings.within_round or young or name not in self.jobs

    def _keep_nodes(self, placements: dict[str, Placement]) -> None:
        """Second jobs that are given a GPU of their pool get the one that they are on, where that is free."""
        holders = {node: name for name, at in placements.items() for node in at.nodes}
        for name in self.seconds:
            at, was = placements.get(name), self.state.running[name]
            if at is None or at == was or at.pool != was.pool or len(at.nodes) != 1:
                continue
            (new,), (old,) = at.nodes, was.nodes
            other = holders.get(old)
            if other is None:
                placements[name] = was
                holders.pop(new, None)
                holders[old] = name
            elif (
                self.state.running.get(other) != placements[other]
                and len(placements[other].nodes) == 1
                and self.nodes[new].group == self.nodes[old].group
            ):
                placements[name], placements[other] = was, dataclasses.replace(at)
                holders[old], holders[new] = name, other

    def _continue(
        self,
        placements: dict[str, Placement],
        staying: set[str],
        *,
        frozen: bool,
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Of pairs' jobs that were given no GPU: (job -> the one it stays beside, job -> why it does not)."""
        beside, ended, occupied = dict[str, str](), dict[str, str](), set[str]()
        first_on, taken = (
            self._first_jobs(placements),
            {node for at in placements.values() for node in at.nodes},
        )
        for second, first in self.seconds.items():
            pair = (first, second)
            for name in pair:
                if name in placements:
                    continue
                was = self.state.running[name]
                (node,) = was.nodes
                holder = first_on.get(node)
                if holder is None and node not in taken and name in staying:
                    placements[name] = was
                    first_on[node] = name
                    taken.add(node)
                    continue
                if holder is None or node in occupied:
                    ended[name] = "its GPU is kept for, or given to, other jobs"
                    continue
                old = holder in pair
                if (old and (frozen or self._must_stay(second))) or self._suit(
                    name, holder, node, was.gpu_type, 0.0 if old else LEAST_PAIR_GAIN
                ):
                    beside[name] = holder
                    occupied.add(node)
                else:
                    ended[name] = self._why_not(name, holder, node, was.gpu_type)
        return beside, ended

    def _first_jobs(self, placements: Mapping[str, Placement]) -> dict[str, str]:
        """Node whose GPU may be shared -> the job that was given it."""
        return {node: name for name, at in placements.items() if (node := self.shared.on(at))}

    def _begin(
        self,
        placements: Mapping[str, Placement],
        beside: dict[str, str],
        decided: Draft,
    ) -> None:
        """Jobs that would wait are put beside first jobs, those first that are owed the most time."""
        occupied = set(beside.values())
        alone = {
            node: first
            for node, first in self._first_jobs(placements).items()
            if first not in occupied and first in self.shared.jobs and not self.nodes[node].closed
        }
        waiting = [
            name
            for name in self.jobs
            if name in self.shared.jobs
            and name not in placements
            and name not in beside
            and name not in decided.kept_off_spot
        ]
        for name in sorted(waiting, key=lambda name: -self._owed(name)):
            best: tuple[float, str] | None = None
            barred = self.question.asks_of(name).barred
            was = self.shared.on(self.state.running.get(name))
            for node, first in sorted(alone.items()):
                gpu_type = self.nodes[node].gpu_type
                if node == was or self.nodes[node].taints in barred:
                    continue
                if self.jobs[name].throughput.get(gpu_type, 0.0) <= 0:
                    continue
                if not self._suit(name, first, node, gpu_type, LEAST_PAIR_GAIN):
                    continue
                together = self.shared.together(name, first, gpu_type)
                if best is None or together > best[0]:
                    best = together, node
            if best is not None:
                beside[name] = alone.pop(best[1])

    def _suit(self, name: str, first: str, node: str, gpu_type: str, gain: float) -> bool:
        suits = (
            self.shared.may_begin(name, first, node, gpu_type) if gain else self.shared.fit(name, first, node)
        )
        return suits and self.shared.together(name, first, gpu_type) >= 1 + gain

    def _why_not(self, name: str, first: str, node: str, gpu_type: str) -> str:
        if not self.shared.fit(name, first, node):
            return f"{first} has its GPU, and the two may not share it"
        together = self.shared.together(name, first, gpu_type)
        return f"{first} has its GPU, and the two did {together:.2f} there of what one does alone"

    def _owed(self, name: str) -> float:
        """Seconds that it was promised and has not received."""
        promised = (self.state.promised or {}).get(name, {})
        return sum(promised.values()) - sum(self.state.received.get(name, {}).values())

    def _draft(
        self,
        decided: Draft,
        placements: dict[str, Placement],
        beside: Mapping[str, str],
        ended: Mapping[str, str],
    ) -> Draft:
        reasons, pairs = {**decided.reasons}, dict[str, Colocation]()
        for name, first in beside.items():
            at = placements[first]
            placements[name] = dataclasses.replace(at)
            if name in self.shared.jobs and first in self.shared.jobs:
                pairs[name] = self.shared.beside(name, first, at.gpu_type)
                pairs[first] = self.shared.beside(first, name, at.gpu_type)
        reasons |= {name: Reason(why) for name, why in ended.items() if name not in placements}
        for name in beside:
            reasons[name] = Reason(f"{placements[name]}, which the round gives to another job")
        for name in self.seconds:
            if name in placements and name not in beside and placements[name] == self.state.running[name]:
                reasons[name] = Reason(f"stays on {placements[name]}, now as its first job")
        for name, pair in pairs.items():
            how = "measured" if pair.measured else "estimated"
            shares = f"shares it with {pair.partner}, at {pair.speed:.2f} of its speed alone ({how})"
            reasons[name] = reasons.get(name, Reason("")).noted(shares)
        return dataclasses.replace(
            decided, question=self.question, placements=placements, reasons=reasons, beside=pairs
        )


def _second_jobs(state: RoundState, shared: SharedGpus) -> dict[str, str]:
    """Running job that is second on its GPU -> the first: the one that has been there longer."""
    there: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(state.running, key=lambda name: (state.running_since.get(name, 0.0), name)):
        node = shared.on(state.running[name])
        if node:
            there[node].append(name)
    return {second: names[0] for names in there.values() for second in names[1:]}


def decide_round(question: Question) -> Round:
    """Decide the round that begins at ``question.now``.

    A gang runs whole or not at all; no node is given more GPUs than it has; a running gang whose grant is
    extended keeps exactly its nodes. The same question gives the same round.

    Whole GPUs are granted by the shares (:mod:`.grants`), with sizes of elastic gangs (:mod:`.elastic`) and
    gangs in several pools (:mod:`.multi_pool`); spread gangs are brought together (:func:`consolidate`); what
    this starts on spot machines keeps within their limits (:mod:`.spot_limits`); jobs that would wait are put
    beside others (:mod:`.colocation`).
    """
    return colocate(functools.partial(within_spot_limits, _without_limits), question).round()


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
        if len(placements) >= moves or ran < settings.min_run_seconds or won < gang.speed * (1 + LEAST_GAIN):
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
