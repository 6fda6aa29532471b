"""Rendezvous of a running job's ranks with those that join it, over the store.

A new rank announces that it is ready, and waits without a limit: the others may be in a long step, or save.
Between two steps rank 0 calls all new ranks. Where each answers, they enter the new process group together
with the others; where one does not, it has ended, and the job continues without them.
"""

import time
from collections.abc import Callable
from typing import Any

from ballast_policies.contract import Plan

from ballast_trainer.distributed.process_group import World, peer_failures
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.errors import Stopped

ANSWER_SECONDS = 10.0
"""How long rank 0 waits for the new ranks' answers, while the other ranks wait for it."""
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
                raise Stopped("told to stop before it joined the others; nothing to save")
            if store.check([_key(plan, "call")]):
                asked = store.get(_key(plan, "call"))
                if asked != answered:
                    store.set(f"{_key(plan, 'here')}/{process}", asked)
                    answered = asked
            sleep(_POLL_SECONDS)


def new_ranks_ready(world: World, plan: Plan) -> bool:
    """Whether all ranks of ``plan`` that are not in ``world`` have announced themselves."""
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

    Args:
        world: the ranks of today.
        plan: with the new ones.
        replaced: whether there is a newer plan, which ends the wait.
        seconds: after which a rank that has not answered has ended.
        sleep: pauses.
        clock: seconds.
    """
    store = world.store
    if not new_ranks_ready(world, plan):
        return False
    call = str(store.add(_key(plan, "call"), 1)).encode()
    awaited = [f"{_key(plan, 'here')}/{process}" for process in _new(world, plan)]
    deadline = clock() + seconds
    while awaited:
        awaited = [key for key in awaited if not (store.check([key]) and store.get(key) == call)]
        if awaited and (clock() > deadline or replaced()):
            return False
        if awaited:
            sleep(_POLL_SECONDS)
    store.set(_key(plan, "enter"), "1")
    return True
