"""Rendezvous of a running job's ranks with those that join it, over the store.

A new rank announces that it is ready, and waits without a limit: the others may be in a long step, or save.
Between two steps rank 0 calls all new ranks. Where each answers, they enter the new process group together
with the others; where one does not, it has ended, and the job continues without them.

A rank that starts again after it was lost comes back under a new name: it announces itself, and rank 0 names
it in a plan that grows as soon as a whole position of the pipeline is back.
"""

import time
from collections.abc import Callable
from typing import Any

from ballast_policies.contract.messages import Rank
from ballast_policies.contract.plan import Plan

from ballast_trainer.distributed.process_group import World, peer_failures
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.distributed.survivors import Fate, tell_name
from ballast_trainer.errors import Stopped

ANSWER_SECONDS = 10.0
"""Seconds that rank 0 waits for the new ranks' answers, while the other ranks wait for it."""
_POLL_SECONDS = 0.02


def _key(plan: Plan, name: str) -> str:
    return f"{name}/launch-{plan.launch}/epoch-{plan.epoch}"


def _new(world: World, plan: Plan) -> list[str]:
    return [rank.process for rank in plan.ranks if rank.process not in world.processes]


def announce_ready(store: Any, plan: Plan, process: str) -> None:
    """Announce that a new rank is ready: the others may stop for it."""
    store.set(f"{_key(plan, 'ready')}/{process}", "1")


def wait_until_called(
    store: Any, plan: Plan, process: str, stop: StopSignal, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """A new rank's wait for the others: answer each call, return once all new ranks have.

    Raises:
        Stopped: SIGTERM.
        PeerLost: rank 0 has ended.
    """
    answered = b""
    with peer_failures():
        while not store.check([_key(plan, "enter")]):
            if stop.received:
                store.delete_key(f"{_key(plan, 'ready')}/{process}")
                store.set(f"{_key(plan, 'here')}/{process}", "")
                raise Stopped("told to stop before it joined the others; nothing to save")
            if store.check([_key(plan, "call")]):
                asked = store.get(_key(plan, "call"))
                if asked != answered:
                    store.set(f"{_key(plan, 'here')}/{process}", asked)
                    answered = asked
            sleep(_POLL_SECONDS)


def new_ranks_ready(world: World, plan: Plan) -> bool:
    """True if all ranks of ``plan`` that are not in ``world`` have announced themselves."""
    missing = [f"{_key(plan, 'ready')}/{process}" for process in _new(world, plan)]
    return not missing or (world.store is not None and bool(world.store.check(missing)))


def call_new_ranks(
    world: World,
    plan: Plan,
    *,
    replaced: Callable[[], bool] = lambda: False,
    seconds: float = ANSWER_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Rank 0's call of the new ranks of a plan; True: each has answered, and enters the new process group.

    One that has not answered after so many ``seconds`` has ended; a newer plan (``replaced``) ends the wait.
    """
    store = world.store
    if not new_ranks_ready(world, plan):
        return False
    call = str(store.add(_key(plan, "call"), 1)).encode()
    awaited = [f"{_key(plan, 'here')}/{process}" for process in _new(world, plan)]
    deadline = clock() + seconds
    # One that has answered may be told to stop while it waits for another.
    while not all(store.check([key]) and store.get(key) == call for key in awaited):
        if clock() > deadline or replaced():
            return False
        sleep(_POLL_SECONDS)
    store.set(_key(plan, "enter"), "1")
    return True


_COUNT, _EPOCH = "returning/count", "returning/epoch"
_RETURN_POLL_SECONDS = 0.1


def next_epoch(store: Any, above: int) -> int:
    """An epoch above that one, which no other plan has had from here."""
    while (epoch := int(store.add(_EPOCH, 1))) <= above:
        pass
    return epoch


def wait_for_growth(store: Any, process: str, stop: StopSignal) -> Plan:
    """Announce a restarted rank and await its plan. Raises Stopped: SIGTERM; PeerLost: the store is gone."""
    with peer_failures():
        tell_name(store, process)
        store.set(_returned(store.add(_COUNT, 1)), process)
        while not store.check([_plan_of(process)]):
            if stop.received:
                raise Stopped("told to stop before it joined the others; nothing to save")
            time.sleep(_RETURN_POLL_SECONDS)
        return Plan.from_json(store.get(_plan_of(process)).decode())


class Returning:
    """Rank 0's plans for ranks that have started again."""

    def __init__(self, store: Any, column: int) -> None:
        """Prepare; the ``column`` ranks of a pipeline position come back together."""
        # A connection of its own, opened before any that a loss shuts.
        self._store, self._column = store.clone(), column
        self._awaited: Plan | None = None

    def growth(self, plan: Plan) -> Plan:
        """``plan``, which is in force, or the one that grows it by ranks that are back."""
        store = self._store
        if any(Fate.GONE.is_of(store, rank.process) for rank in plan.ranks):
            # The others have yet to notice, and go on by another plan.
            return plan
        keys = [_returned(number + 1) for number in range(store.add(_COUNT, 0))]
        back = [store.get(key).decode() for key in keys if store.check([key])]
        back = [
            process
            for process in back
            if plan.rank_of(process) is None and not Fate.GONE.is_of(store, process)
        ]
        awaited = self._awaited
        if awaited is not None and awaited.ranks[: len(plan.ranks)] == plan.ranks:
            new = awaited.ranks[len(plan.ranks) :]
            if new and all(rank.process in back for rank in new):
                return awaited
        waiting = []
        for process in back:
            if store.check([_plan_of(process)]):
                # Its plan is not followed any more: it has to start again.
                Fate.HUNG.tell(store, process)
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
