"""The operator's real loops over the strict cluster in memory, with everything around them able to fail."""

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from typing import Any

from ballast_operator.errors import OperatorError
from ballast_operator.kube.caches import SELECTORS, WATCHED
from ballast_operator.kube.kinds import POD, Kind

from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.machines import Trainer
from tests.operator.loops.simulated.simulation import Simulation
from tests.operator.loops.simulated.world import Crash, World

JOBS = ("one", "two", "three", "four", "five")
NODES = {"a": ("fast", 2), "b": ("fast", 2), "c": ("slow", 2)}
TOTAL_STEPS = 900


class TroubledCluster(FakeCluster):
    """The operator's client; ``trouble`` is asked before each request."""

    def __init__(self, world: World, trouble: Callable[[str], None]) -> None:
        super().__init__(world)
        self._trouble = trouble

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        self._trouble("get")
        return await super().get(kind, namespace, name)

    async def list(self, kind: Kind, **how: str) -> Any:
        self._trouble("list")
        return await super().list(kind, **how)

    async def try_create(self, kind: Kind, body: Any) -> dict[str, Any]:
        self._trouble("try")
        return await super().try_create(kind, body)

    def _begin(self, what: str) -> None:
        self._trouble("write")
        super()._begin(what)


@dataclasses.dataclass
class Trouble:
    """What is wrong for a while: until which tick."""

    away: int = 0
    api_down: int = 0
    refused: int = 0
    silent: dict[str, int] = dataclasses.field(default_factory=dict)
    deaf: dict[str, int] = dataclasses.field(default_factory=dict)
    suspended: dict[str, int] = dataclasses.field(default_factory=dict)
    stalled: dict[Kind, int] = dataclasses.field(default_factory=dict)
    nodes: dict[str, int] = dataclasses.field(default_factory=dict)
    next_write: list[Callable[[], None]] = dataclasses.field(default_factory=list)


class ChaosSimulation(Simulation):
    """Five jobs on three nodes: one repacks, two are elastic, one is a script, one has pods of two.

    Not all fit.
    """

    def __init__(self) -> None:
        self.number = 0
        self.trouble = Trouble()
        self.error: Exception | None = None
        self.refusal: Callable[[Kind, Mapping[str, Any]], None] = lambda kind, body: None
        super().__init__(nodes=NODES, roundSeconds=30, moves={"maxMovesPerHour": 1000})
        self.world.admission = self._admit
        for name in JOBS:
            shrink_at = 100 if name == "one" else None
            trainer = {"total": TOTAL_STEPS, "shrink_at": shrink_at, "scales": True}
            spec: dict[str, Any] = {"totalSteps": TOTAL_STEPS, "backoffLimit": 1000}
            if name == "five":
                self.add_script(name, command={"total": TOTAL_STEPS}, **spec)
                continue
            if name == "two":
                spec |= {"parallelism": {"gpusPerPod": 2}}
            if name in ("three", "four"):
                spec |= {"stages": (1, 3)}
            self.add_job(name, trainer=trainer, **spec)

    def connect(self) -> FakeCluster:
        self._listed: set[Kind] = set()
        return TroubledCluster(self.world, self._before_request)

    def _before_request(self, verb: str) -> None:
        if self.number < self.trouble.api_down and self.error is not None:
            raise self.error
        if verb == "write" and self.trouble.next_write:
            self.trouble.next_write.pop(0)()

    def _admit(self, kind: Kind, body: Mapping[str, Any]) -> None:
        if kind is POD and self.number < self.trouble.refused:
            self.refusal(kind, body)

    async def pass_time(self, seconds: float) -> None:
        """One tick, with what is wrong now."""
        self.number += 1
        trouble = self.trouble
        for name, trainer in self.trainers.items():
            trainer.silent = self.number < trouble.silent.get(name, 0)
            if isinstance(trainer, Trainer):
                trainer.deaf = self.number < trouble.deaf.get(name, 0)
        await self.tick(seconds=seconds, operator=self.number >= trouble.away)

    async def _operate(self) -> None:
        """As in the simulation, but watches may stall, and only the operator's own errors are expected."""
        try:
            for kind in WATCHED:
                if kind in self._listed and self.number < self.trouble.stalled.get(kind, 0):
                    continue
                items, version = await self.cluster.list(kind, label_selector=SELECTORS.get(kind, ""))
                self.caches.listed(kind, items, version)
                self._listed.add(kind)
            await self.decide()
        except OperatorError:
            if len(self._listed) < len(WATCHED):
                return
        for _ in range(3):
            written = self.world.writes
            for key in sorted(self.keys()):
                try:
                    await self.reconciler.reconcile(key)
                except OperatorError:
                    continue
            if self.world.writes == written:
                return

    def jump(self, seconds: int) -> None:
        """The clock that the operator reads jumps."""
        self.now += datetime.timedelta(seconds=seconds)


__all__ = ["JOBS", "NODES", "ChaosSimulation", "Crash"]
