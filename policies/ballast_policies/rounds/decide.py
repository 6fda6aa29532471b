"""One round: which gangs run where until the next."""

from ballast_policies.rounds.colocation import colocate
from ballast_policies.rounds.consolidate import consolidate
from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.hysteresis import moves_left
from ballast_policies.rounds.multi_pool import grant_multi_pool
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.spot_limits import within_spot_limits
from ballast_policies.rounds.values import Round


def decide_round(question: Question) -> Round:
    """Decide the round that begins at ``question.now``.

    A gang runs whole or not at all; no node is given more GPUs than it has; a running gang whose grant is
    extended keeps exactly its nodes. The same question gives the same round.

    Whole GPUs are granted by the shares (:mod:`.grants`), with sizes of elastic gangs (:mod:`.elastic`) and
    gangs in several pools (:mod:`.multi_pool`); spread gangs are brought together (:mod:`.consolidate`); what
    this starts on spot machines keeps within their limits (:mod:`.spot_limits`); jobs that would wait are put
    beside others (:mod:`.colocation`).
    """
    return colocate(_on_whole_gpus, question).round()


def _on_whole_gpus(question: Question) -> Draft:
    return within_spot_limits(_without_limits, question)


def _without_limits(question: Question) -> Draft:
    decided = grant_multi_pool(question)
    return consolidate(decided, moves_left(question) - decided.changes.disturbed)
