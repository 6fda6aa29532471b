"""Ranks that start again after they were lost: they come back under a new name, by a plan that grows.

A rank announces itself over the store.  Rank 0 finds it there, and names it in a plan as soon as a whole
position of the pipeline is back; from there on it joins as any new rank does.
"""

import time
from typing import Any

from ballast_policies.contract import Plan, Rank

from ballast_trainer.distributed.process_group import peer_failures
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.distributed.survivors import is_gone, tell_hung, tell_name
from ballast_trainer.errors import Stopped

_COUNT, _EPOCH = "returning/count", "returning/epoch"
_POLL_SECONDS = 0.1


def next_epoch(store: Any, above: int) -> int:
    """An epoch above that one, which no other plan has had from here."""
    while (epoch := int(store.add(_EPOCH, 1))) <= above:
        pass
    return epoch


def wait_for_growth(store: Any, process: str, stop: StopSignal) -> Plan:
    """Announce a rank that has started again, and wait for the plan that names it.

    Raises:
        Stopped: SIGTERM.
        PeerLost: the store is gone.
    """
    with peer_failures():
        tell_name(store, process)
        store.set(_returned(store.add(_COUNT, 1)), process)
        while not store.check([_plan_of(process)]):
            if stop.received:
                raise Stopped("told to stop before it joined the others; nothing to save")
            time.sleep(_POLL_SECONDS)
        return Plan.from_json(store.get(_plan_of(process)).decode())


class Returning:
    """Rank 0's plans for ranks that have started again."""

    def __init__(self, store: Any, column: int) -> None:
        """Prepare.

        Args:
            store: where ranks meet; a separate connection is opened, before any that a loss shuts.
            column: ranks of a pipeline position, which come back together.
        """
        self._store, self._column = store.clone(), column
        self._awaited: Plan | None = None

    def growth(self, plan: Plan) -> Plan:
        """``plan``, which is in force, or the one that grows it by ranks that are back."""
        store = self._store
        if any(is_gone(store, rank.process) for rank in plan.ranks):
            # The others have yet to notice, and go on by another plan.
            return plan
        keys = [_returned(number + 1) for number in range(store.add(_COUNT, 0))]
        back = [store.get(key).decode() for key in keys if store.check([key])]
        back = [process for process in back if plan.rank_of(process) is None and not is_gone(store, process)]
        awaited = self._awaited
        if awaited is not None and awaited.ranks[: len(plan.ranks)] == plan.ranks:
            new = awaited.ranks[len(plan.ranks) :]
            if new and all(rank.process in back for rank in new):
                return awaited
        waiting = []
        for process in back:
            if store.check([_plan_of(process)]):
                # Its plan is not followed any more: it has to start again.
                tell_hung(store, process)
            else:
                waiting.append(process)
        if len(waiting) < self._column:
            return plan
        first = len(plan.ranks)
        like = plan.ranks[0]
        new_ranks = [
            Rank(rank=first + number, pod=process, address=like.address, gpu_type=like.gpu_type)
            for number, process in enumerate(waiting[: self._column])
        ]
        grown = plan.grow(new_ranks, f"{', '.join(waiting[: self._column])} started again")
        self._awaited = grown.replace(epoch=next_epoch(store, plan.epoch))
        for rank in new_ranks:
            store.set(_plan_of(rank.process), self._awaited.to_json())
        return self._awaited


def _returned(number: int) -> str:
    return f"returning/{number}"


def _plan_of(process: str) -> str:
    return f"returning/plan/{process}"
