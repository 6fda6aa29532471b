"""Going on in place after a loss: the ranks that are left keep their processes and divide the layers anew."""

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ballast_client.api_server import ChannelError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.planning.launch import usable_stages

from ballast_trainer.causes import describe
from ballast_trainer.checkpoints.memory_copies import LostRanks, MemoryCopies
from ballast_trainer.distributed.activity import ACTIVITY
from ballast_trainer.distributed.connections import CONNECTIONS
from ballast_trainer.distributed.heartbeat import RankHeartbeat
from ballast_trainer.distributed.joining import next_epoch
from ballast_trainer.distributed.process_group import is_peer_failure, peer_failures, told_once
from ballast_trainer.distributed.survivors import Survivors
from ballast_trainer.errors import ConfigurationError, PeerLost, WaitedTooLong
from ballast_trainer.loop.rank_launch import RankLaunch, ties_key
from ballast_trainer.loop.replanning import LayerSizes, stages_left
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.models.protocol import Model

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LOOK_SECONDS = 0.5
_PLAN_SECONDS = 0.1
_IDLE_SECONDS = 5.0
"""Without any work after its connections have ended, a thread waits in vain."""


class InPlace:
    """This rank's part in it.

    Attributes:
        memory: the copies to go on from.
        survivors: this process among those that go on.
        store: where they meet.
        model: of the newest plan that all ranks have met under; None: there was none.
        run: under that plan.
        heartbeat: at the store; None: there is none.
        sizes: of its layers; None: not known.
    """

    def __init__(self, memory: MemoryCopies, launch: RankLaunch, config: JobConfig) -> None:
        """Prepare at the launch's store, which outlives the ranks; ``config``: by which all go on.

        Without ``launch.regrouped`` all go on by the operator's plan, which leaves out pods that are lost,
        with those of its ranks that start again.
        """
        self.memory, self.survivors = memory, Survivors(launch.store, launch.process)
        self.store, self._process, self._regrouped = launch.store, launch.process, launch.regrouped
        self._restarts, self._launch, self._config = launch.restarts or 0, launch, config
        self.model: ModelState | None = None
        self.run: RunState | None = None
        self.heartbeat: RankHeartbeat | None = None
        self.sizes: LayerSizes | None = None

    @property
    def definition(self) -> Model:
        """The job's model, with its ties."""
        assert self.model is not None
        return self.model.definition

    def none_goes_on(self, error: BaseException) -> None:
        """This rank ends by an error of its own, which the others would meet, too."""
        with contextlib.suppress(RuntimeError, ConnectionError):  # the store is gone, too
            self.survivors.none_goes_on(f"{self._process} has ended: {describe(error)}")

    def attempt(self, work: Callable[[], Result]) -> Result:
        """``work`` on a thread of its own; left behind where the end of its connections does not wake it.

        Raises:
            PeerLost: it was left behind.
        """
        made, clocks = Future[Result](), list[int]()

        def run() -> None:
            clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            try:
                made.set_result(work())
            except BaseException as error:
                made.set_exception(error)

        thread = threading.Thread(target=run, name="training", daemon=True)
        thread.start()
        used, since = 0.0, time.monotonic()
        while not wait([made], timeout=_LOOK_SECONDS).done:
            before, used = used, time.clock_gettime(clocks[0]) if clocks else -1.0
            # Work of its own ends by itself.
            if used != before or ACTIVITY.now is not None or not self.survivors.noticed:
                since = time.monotonic()
            elif time.monotonic() - since > _IDLE_SECONDS:
                CONNECTIONS.leave_behind(thread.ident or 0)
                raise PeerLost("another rank is gone, and this one waited for the rest of a message")
        return made.result()

    def next_plan(self, plan: Plan, error: PeerLost) -> Plan:
        """The plan of the ranks that are left, to go on by. Raises PeerLost: this one does not go on."""
        noticed, model, run = time.monotonic(), self.model, self.run
        if run is None and self._restarts:
            return self.come_back(plan)
        if model is None or run is None:
            # It was about to join, or none has met any other.
            raise error
        if isinstance(error, WaitedTooLong):
            self.none_goes_on(error)
            raise error
        logger.warning("%s; the ranks that are left agree on how to go on", error)
        if run.plan.epoch > plan.epoch:
            plan = run.plan
        # A candidate of the plan may have had another schedule, which ranks that start again do not know.
        model.config = self._config
        # In pods they may have failed to meet under ``plan``.
        before = plan if self._regrouped is not None else run.plan
        CONNECTIONS.shut()
        with contextlib.suppress(RuntimeError):
            model.world.leave()
        smaller = _SmallerPlan(plan, self._newest_plan)
        with peer_failures():
            text = self._agree(
                plan, smaller, lambda left: self._decide(model, smaller.without(left), left, before)
            )
        chosen = self._follow(json.loads(text), noticed, error)
        model.release()
        if self._regrouped is not None and chosen.ranks[0].process == self._process:
            try:
                self._regrouped(chosen)
            except ChannelError as error_of_channel:
                logger.warning("the plan of the ranks that are left is not told: %s", error_of_channel)
        return chosen

    def _agree(self, plan: Plan, smaller: "_SmallerPlan", decide: Callable[[Mapping[str, str]], str]) -> str:
        """Agreement of the ranks that are left on how to go on; at another store if this one was lost."""
        if self._regrouped is not None:
            # Their parent tells who is gone.
            return self.survivors.agree(self._told(), decide)
        own = next(rank.pod for rank in plan.ranks if rank.process == self._process)
        host = plan.ranks[0].pod

        def left_out() -> Collection[str]:
            gone = smaller.left_out()
            if smaller.first_pod != host:
                raise _AnotherStore
            return gone

        while True:
            try:
                if not self.survivors.store_lost:
                    return self.survivors.agree(self._told(), decide, left_out)
            except _AnotherStore:
                pass
            except (RuntimeError, ConnectionError) as error:
                if not is_peer_failure(error):
                    raise
            if self._launch.store_of is None or own == host:
                raise PeerLost(f"the store of {host}, at which the ranks meet, is gone")
            logger.warning("%s is lost, and its store: the others meet at another one", host)
            while smaller.first_pod == host:
                time.sleep(_PLAN_SECONDS)
                smaller.left_out()
            self.store = self._launch.store_of(smaller.newest)
            told_once(self.store, ties_key(smaller.newest), self.definition.tied, tells=True)
            self.survivors, host = self.survivors.at(self.store), smaller.first_pod
            if self.heartbeat is not None:
                self.heartbeat = self.heartbeat.at(self.store, self.survivors)

    def _newest_plan(self) -> Plan | None:
        if self._launch.stop.received:
            raise PeerLost("told to stop while it waited for a plan by which the ranks that are left go on")
        return self._launch.channel.read_plan()

    def come_back(self, plan: Plan) -> Plan:
        """The plan by which the others go on with this rank, which was killed and has started again.

        ``plan``: the newest.

        Raises:
            PeerLost: they do not.
        """
        noticed, told = time.monotonic(), self._told()
        while True:
            with peer_failures():
                text = self.survivors.come_back(told, [rank.process for rank in plan.ranks])
            decision = json.loads(text)
            # One of before this process counts on what is gone: the others are woken once more.
            if "refused" in decision or decision["restarts"].get(self._process) == self._restarts:
                return self._follow(decision, noticed, None)

    def _told(self) -> str:
        """State of this rank that whoever decides has to know."""
        return json.dumps(
            {
                "copies": self.memory.told(),
                "moments": self.memory.moments(),
                "restarts": self._restarts,
                "anew": self.run is None,
            }
        )

    def _follow(self, decision: Mapping[str, Any], noticed: float, error: PeerLost | None) -> Plan:
        """Go on as it was decided; returns the plan. Raises PeerLost: not with this rank."""
        because = "" if error is None else f" ({error})"
        if "refused" in decision:
            raise PeerLost(f"{decision['refused']}{because}")
        chosen = Plan.from_json(decision["plan"])
        if self._process not in {rank.process for rank in chosen.ranks}:
            raise PeerLost(f"the others go on without this rank, whose pod or stage is not whole{because}")
        source = decision["source"]
        self.memory.go_on(
            None if source is None else (source[0], source[1]),
            LostRanks(processes=tuple(decision["lost"]), ranks=decision["ranks"], noticed=noticed),
            decision["moment"],
        )
        return chosen

    def _decide(self, model: ModelState, plan: Plan, left: Mapping[str, str], before: Plan) -> str:
        """Decision on how these processes go on, as text for :meth:`_follow` of each.

        ``plan``: of those that are to go on; ``before``: which may have had more.
        """
        told = {process: json.loads(text) for process, text in left.items()}
        copies = {process: of["copies"] for process, of in told.items()}
        anew = {process for process, of in told.items() if of["anew"]}
        gone = [rank.process for rank in before.ranks if rank.process not in told or rank.process in anew]
        try:
            if self._regrouped is None:
                ended = [rank.process for rank in plan.ranks if rank.process not in told]
                if ended:
                    return json.dumps({"refused": f"{', '.join(ended)} has ended before all could go on"})
                kept = [rank.process for rank in plan.ranks]
                source = best_copies([copies[process] for process in kept])
                placement = model.placement(len(kept))
                stages = usable_stages(model.stages, placement, model.definition.layer_count)
            else:
                kept, source = who_goes_on(plan, copies, model.world.mesh.column)
                if not kept:
                    return json.dumps({"refused": "no pipeline position is left whole"})
                stages = None
            stages = stages or stages_left(model, self.sizes, len(kept))
        except ConfigurationError as error:
            return json.dumps({"refused": f"the ranks that are left cannot go on: {error}"})
        if source is None:
            reason = f"no copy is left in memory of all layers: {', '.join(gone)} were lost together"
            if model.config.checkpoint.path is None:
                return json.dumps({"refused": f"{reason}, and without checkpoint.path nothing is saved"})
            logger.warning("%s: going back to the newest checkpoint", reason)
        lost = [rank.process for rank in before.ranks if rank.process not in kept or rank.process in anew]
        by_process = {rank.process: rank for rank in plan.ranks}
        moments = (zip(of["copies"], of["moments"], strict=True) for of in told.values())
        chosen = plan.replace(
            # A change of shape may have been under way; in pods only the operator gives out epochs.
            epoch=plan.epoch if self._regrouped is None else next_epoch(self.store, plan.epoch + 1),
            directive=Directive.RUN,
            ranks=tuple(by_process[process].replace(rank=rank) for rank, process in enumerate(kept)),
            stages=stages,
            reason=f"{len(lost)} ranks are lost",
        )
        return json.dumps(
            {
                "plan": chosen.to_json(),
                "source": source,
                "moment": next((at for rows in moments for of, at in rows if of[:2] == source), None),
                "restarts": {process: of["restarts"] for process, of in told.items()},
                "lost": lost,
                "ranks": len(before.ranks),
            }
        )


class _AnotherStore(Exception):  # noqa: N818 - no error
    """The operator's plan has another first pod, at whose store the ranks that are left meet."""


class _SmallerPlan:
    """The operator's plan without lost pods, read while the others wait; ``newest``: that was read."""

    def __init__(self, plan: Plan, newest: Callable[[], Plan | None]) -> None:
        self._plan = self.newest = plan
        self._read, self._at = newest, -_LOOK_SECONDS

    def left_out(self) -> set[str]:
        """The ranks that a newer plan has no more."""
        if time.monotonic() - self._at >= _LOOK_SECONDS:
            self._at = time.monotonic()
            try:
                newest = self._read()
            except ChannelError as error:
                logger.warning("channel: %s; trying again", error)
                newest = None
            named = set() if newest is None else {rank.process for rank in newest.ranks}
            if newest is not None and newest.epoch > self.newest.epoch and named < self._processes:
                # One that stops them is followed as soon as they train.
                stops = newest.directive is Directive.CHECKPOINT_AND_STOP
                self.newest = newest.replace(epoch=newest.epoch - stops)
        return self._processes - {rank.process for rank in self.newest.ranks}

    @property
    def first_pod(self) -> str:
        """First pod of the newest plan that was read."""
        return self.newest.ranks[0].pod

    def without(self, left: Collection[str]) -> Plan:
        """The one before, if all its ranks are left, else the newest that was read."""
        return self._plan if self._processes <= set(left) else self.newest

    @property
    def _processes(self) -> set[str]:
        return {rank.process for rank in self._plan.ranks}


def who_goes_on(
    plan: Plan, told: Mapping[str, list[list[Any]]], column: int
) -> tuple[list[str], list[int] | None]:
    """The processes that go on, by rank, and the copies that they go on from: each of them has some.

    Args:
        plan: in force.
        told: by process that is left what :meth:`MemoryCopies.told` returned; of one that has just joined
            nothing, or no whole copy.
        column: ranks of a pipeline position.
    """
    kept = _whole(plan, set(told), column)
    source = best_copies([told[process] for process in kept])
    having = {p: of for p, of in told.items() if source is None or any(one[:2] == source for one in of)}
    return (kept, source) if having.keys() >= set(kept) else who_goes_on(plan, having, column)


def best_copies(told: list[list[list[Any]]]) -> list[int] | None:
    """Step and epoch of the copies of which every part is left; None: there are none.

    Of several those that most processes have some of, then the newest.

    ``told``: by process what :meth:`MemoryCopies.told` returned.
    """
    parts: dict[tuple[int, int, int], list[int]] = {}
    holders: Counter[tuple[int, int, int]] = Counter()
    for generations in told:
        for step, epoch, ranks, held in generations:
            holders[step, epoch, ranks] += 1
            parts.setdefault((step, epoch, ranks), []).extend(held)
    whole = [name for name, held in parts.items() if len(set(held)) == name[2]]
    return list(max(whole, key=lambda name: (holders[name], name))[:2]) if whole else None


def _whole(plan: Plan, left: set[str], column: int) -> list[str]:
    """The processes of the pods and pipeline positions that are left whole, by rank."""
    kept = [rank.process for rank in plan.ranks]
    pods = {rank.process: rank.pod for rank in plan.ranks}
    while True:
        broken = {pods[process] for process in kept if process not in left}
        for first in range(0, len(plan.ranks), column):
            members = [rank.process for rank in plan.ranks[first : first + column]]
            if not left.issuperset(members) or broken.intersection(pods[m] for m in members):
                broken.update(pods[member] for member in members)
        gone = {process for process in kept if pods[process] in broken}
        if not gone:
            return kept
        kept = [process for process in kept if process not in gone]
        left = left - gone
