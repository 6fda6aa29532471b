"""The real operator's loops over a cluster in memory, with a clock that only moves when told."""

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ballast_operator.allocator.allocator import Allocator, DecisionThrottle
from ballast_operator.allocator.costs.price_feeds import PriceFeeds
from ballast_operator.allocator.policy_status import PolicyReporter
from ballast_operator.allocator.saved_state import StateStore
from ballast_operator.allocator.solver import Solve
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.api.read import read_job_status
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.cli.live.explain import as_text
from ballast_operator.errors import ActionRefused, Conflict, NotFound, Unavailable
from ballast_operator.history.recent import Recent
from ballast_operator.history.writer import HistoryWriter, Keep
from ballast_operator.kube.caches import SELECTORS, WATCHED, Caches
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, NODE, POD, POLICY, Key
from ballast_operator.metrics import Metrics
from ballast_operator.observation.decoded import DecodedJobs
from ballast_operator.observation.events import Recorder
from ballast_operator.observation.observer import Observer
from ballast_operator.reconcile.changes import Changes, KeyQueue, ReconcileWorker
from ballast_operator.reconcile.reconciler import Reconciler
from ballast_operator.report.costs import Costs, costs
from ballast_operator.report.explanation import explanation
from ballast_operator.settings import JobSettings, SolverSettings
from ballast_operator.views.clock import Clock, show
from ballast_operator.waits import Waits
from ballast_policies.allocation.registry import allocate
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import CONFIG_KEY, JOB_LABEL, PLAN_KEY, plan_config_map_name
from ballast_policies.contract.plan import Plan

from tests.operator.loops.simulated.commands import Command
from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.machines import Trainer, node, run_pods
from tests.operator.loops.simulated.world import Crash, World, as_sent

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NAMESPACE = "team"


class AtOnce(ThreadPoolExecutor):
    """What the operator hands to a thread, so that its loop answers meanwhile, is done on the spot."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


AT_ONCE = AtOnce()


class InProcessSolver:
    """The same policies, without a process."""

    async def solve(self, policy: str, problem: Any, *, limit_seconds: float, options: Any) -> Solve:
        allocation = allocate(policy, problem, **options)
        return Solve(allocation=allocation, outcome=PolicyReason.OPTIMAL, message="", seconds=0.0)


def at(seconds: float) -> str:
    """The time after so many seconds of a simulation, as specs have it."""
    return show(START + datetime.timedelta(seconds=seconds))


def template(*more: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Of a job's pods: the trainer's container and ``more``."""
    return {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}, *more], **spec}}


def fast_and_slow(**policy: Any) -> "Simulation":
    """Two GPUs of each of two pools."""
    return Simulation(nodes={"a": ("fast", 2), "b": ("slow", 2)}, **policy)


def job(name: str, *, stages: tuple[int, int] = (2, 2), **spec: Any) -> dict[str, Any]:
    """A TrainingJob as the API server stores it."""
    content = {
        "totalSteps": 100,
        "model": {"name": "gpt"},
        "pipeline": {
            "minStages": stages[0],
            "maxStages": stages[1],
            "microbatches": 8,
            "globalBatchSize": 16,
        },
        "checkpoint": {"path": "/checkpoints"},
        "repack": {"enabled": True, "minStages": 1, "maxSlowdown": 0.1},
        "template": template(),
    }
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {**content, **spec},
    }


def policy(*pools: str, pool_fields: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A ClusterPolicy over pools that are named as their label and their GPU type; ``pool_fields``: more."""
    listed = [
        {"name": pool, "nodeSelector": {"pool": pool}, "gpuType": pool, **(pool_fields or {}).get(pool, {})}
        for pool in pools
    ]
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "default"},
        "spec": {"nodePools": listed, "roundSeconds": 60, **spec},
    }


def throughput(stages: int = 2, **by_type: float) -> list[dict[str, Any]]:
    """What a spec states of a job's speed on so many GPUs: GPU type -> steps/s."""
    return [
        {"gpuType": gpu_type, "stages": stages, "stepsPerSecond": rate} for gpu_type, rate in by_type.items()
    ]


class Simulation:
    """A world, its machines, and an operator that may die and come back.

    Every job gets a pass in every tick, unless ``by_queue``; the allocator decides when it would: asked to by
    a watch or a pass, or at its time.

    Attributes:
        follower: caches of a replica that follows; the next operator starts with them. None: with nothing.
        ahead: of the true time is the operator's clock.
        by_queue: those jobs alone get a pass for which the operator's queue has one that is due.
        history: of an operator that keeps it, in ``history_file``; written when a test says so.
        pools: of a pool that has no nodes yet, or more fields than its name as label and GPU type.
    """

    follower: Caches | None = None
    ahead = datetime.timedelta()
    asks_kueue = False
    by_queue = False

    def __init__(
        self,
        *,
        nodes: dict[str, tuple[str, int]],
        pools: Mapping[str, Any] | None = None,
        history_file: Path | None = None,
        **policy_spec: Any,
    ) -> None:
        self.world, self.history_file = World(), history_file
        self.now = START
        self.trainers: dict[str, Trainer | Command] = {}
        self.restarts = 0
        self.died_at = ""
        for name, (pool, gpus) in nodes.items():
            self.world.put(NODE, node(name, pool, gpus))
        names = dict.fromkeys([pool for pool, _ in nodes.values()] + list(pools or ()))
        self.world.put(POLICY, policy(*names, pool_fields=pools, **policy_spec))
        self.start_operator()

    def add_job(self, name: str, *, trainer: dict[str, Any] | None = None, **spec: Any) -> None:
        """A job, and its trainer, which does all of its steps."""
        item = job(name, **spec)
        self.world.put(JOB, item)
        steps = {"total": item["spec"]["totalSteps"]}
        self.trainers[name] = Trainer(NAMESPACE, name, **{**steps, **(trainer or {})})

    async def run_job(self, name: str, **spec: Any) -> None:
        """Add a job, and tick until it runs."""
        self.add_job(name, **spec)
        await self.running(name)

    def add_script(
        self,
        name: str,
        *,
        command: dict[str, Any] | None = None,
        ranks: tuple[int, int] = (2, 2),
        **spec: Any,
    ) -> None:
        """A job without a model, and what its pods run."""
        item = job(name, **spec)
        own = {key: item["spec"][key] for key in ("totalSteps", "template", *spec)}
        sizes = {"pipeline": {"minStages": ranks[0], "maxStages": ranks[1]}}
        self.world.put(JOB, {**item, "spec": {**own, **sizes}})
        steps = {"total": own["totalSteps"]}
        self.trainers[name] = Command(NAMESPACE, name, **{**steps, **(command or {})})

    def start_operator(self) -> None:
        """A fresh process, or the follower: what it has seen is as old as its last look."""
        self.cluster = self.connect()
        self.caches, self.follower = self.follower or Caches(), None
        self.observer = Observer(
            self.caches, DecodedJobs(self.caches), clock=Clock(self._time, self._seconds)
        )
        self.metrics = Metrics()
        self.waits = Waits()
        self.recorder = Recorder(self.cluster)
        self.reporter = PolicyReporter(
            self.cluster,
            self.caches,
            self.recorder,
            clock=self._time,
            waits=self.waits,
            history=None if self.history_file is None else self._history(self.history_file),
        )
        self.reconciler = Reconciler(
            self.cluster,
            self.observer,
            settings=JobSettings(kueue=self.asks_kueue),
            metrics=self.metrics,
            allocate=self.asked_to_decide,
            recorder=self.recorder,
        )
        queue = self.queue = KeyQueue(self._seconds)
        changes = Changes(
            self.observer,
            queue,
            settings=JobSettings(),
            allocate=self.asked_to_decide,
            arrived=lambda view: self.asked_to_decide(),
        )
        self.worker = ReconcileWorker(self.reconciler, metrics=self.metrics, again=changes.again)
        self.allocator = Allocator(
            self.observer,
            InProcessSolver(),
            settings=SolverSettings(),
            metrics=self.metrics,
            enqueue=changes.again,
            enqueue_in_turn=changes.again_in_turn,
            waits=self.waits,
            throttle=DecisionThrottle(SolverSettings().debounce_seconds),
            store=StateStore(self.cluster, "ballast-system"),
            feeds=PriceFeeds(self.cluster, "ballast-system"),
            reporter=self.reporter,
        )
        self.caches.listeners.append(changes.changed)
        # An operator decides when it starts.
        self.asked, self.decisions = True, 0

    def _history(self, path: Path) -> HistoryWriter:
        from ballast_operator.history.store import History  # SQLAlchemy, which most simulations do not need

        recent = Recent(self.caches, clock=self._epoch)
        self.history = HistoryWriter(
            History(path),
            recent,
            self.metrics,
            keep=Keep(),
            leads=lambda: True,
            work_out=True,
        )
        return self.history

    def asked_to_decide(self) -> None:
        """A watch or a pass has something new for the allocator."""
        self.asked = True

    async def follow(self) -> None:
        """Another replica looks at the world, as a watch would that stands still from now on."""
        self.follower = Caches()
        await self._look(self.connect(), self.follower)

    async def look(self) -> None:
        """The watches bring what there is."""
        await self._look(self.cluster, self.caches)

    async def _look(self, cluster: FakeCluster, caches: Caches) -> None:
        for kind in WATCHED:
            items, version = await cluster.list(kind, label_selector=SELECTORS.get(kind, ""))
            caches.listed(kind, items, version)

    def connect(self) -> FakeCluster:
        """The operator's connection to the API server."""
        return FakeCluster(self.world)

    def _time(self) -> datetime.datetime:
        return self.now + self.ahead

    def _seconds(self) -> float:
        return (self.now - START).total_seconds()

    def _epoch(self) -> float:
        return self.now.timestamp()

    async def tick(self, *, seconds: float = 1.0, operator: bool = True, decides: bool = False) -> None:
        """Time passes; machines and the operator do what they do in it; ``decides``: due or not."""
        self.asked = self.asked or decides
        self.now += datetime.timedelta(seconds=seconds)
        run_pods(self.world, self.now)
        for trainer in self.trainers.values():
            trainer.act(self.world, self.now)
        self.world.checked()
        if not operator:
            return
        try:
            await self._operate()
            await self.report()
            await asyncio.sleep(0)  # tasks beside it have their turn: from Python 3.14 nothing else yields
        except Crash:
            self.restarts += 1
            self.start_operator()

    async def _operate(self) -> None:
        asyncio.get_running_loop().set_default_executor(AT_ONCE)
        await self.look()
        try:
            await self.decide()
        except (Conflict, NotFound, Unavailable):
            return
        while self.by_queue and self.queue.due():
            key = await self.queue.take()
            await self.worker(key)
            self.queue.done(key)
        for _ in range(0 if self.by_queue else 3):
            written = self.world.writes
            for key in sorted(self.keys()):
                try:
                    await self.reconciler.reconcile(key)
                except (Conflict, NotFound, Unavailable):
                    continue
                except ActionRefused as error:
                    await self.reconciler.report_error(key, error)
            if self.world.writes == written:  # the caches are as they were: another pass decides the same
                return

    async def decide(self) -> None:
        """One decision, if it is due."""
        at = self.allocator.next_at
        if self.asked or (at is not None and at <= self._time().timestamp()):
            self.asked = False
            self.decisions += 1
            try:
                await self.allocator.decide()
            except BaseException:
                self.asked = True  # it is tried again
                raise
        await self.report()

    async def attempt(self) -> None:
        """One decision, due or not, whose errors end where the operator has them end."""
        await self.allocator.attempt()
        await self.report()

    async def report(self) -> None:
        """Write what the operator writes in the background."""
        await self.reporter.write_waiting()
        await self.recorder.post_waiting()

    def keys(self) -> list[Key]:
        return [(item["metadata"]["namespace"], item["metadata"]["name"]) for item in self.world.items(JOB)]

    async def until(self, reached: Callable[[], bool], *, ticks: int = 200, **how: Any) -> int:
        """Tick until ``reached``; how many ticks it took."""
        for number in range(ticks):
            if reached():
                return number
            await self.tick(**how)
        raise AssertionError(f"not reached within {ticks} ticks; statuses: {self.all_statuses()}")

    def change(self, name: str, **spec: Any) -> None:
        """The job's owner edits it; None: a field is removed."""
        self.world.patch(JOB, NAMESPACE, name, {"spec": spec})

    async def suspended(self, name: str) -> None:
        """The job's owner suspends it; tick until it holds nothing."""
        self.change(name, suspend=True)
        await self.until(lambda: self.state(name) == "Suspended")

    async def relaunched(self, name: str) -> None:
        """The same, and it is resumed; tick until it runs again."""
        await self.suspended(name)
        self.change(name, suspend=False)
        await self.running(name)

    def change_policy(self, **spec: Any) -> None:
        """The same of the ClusterPolicy."""
        self.world.patch(POLICY, "", "default", {"spec": spec})

    @contextlib.contextmanager
    def changed_pools(self) -> Iterator[dict[str, dict[str, Any]]]:
        """The policy's pools by name, to be changed, added and taken out in one edit."""
        pools = {pool["name"]: pool for pool in as_sent(self.policy()["spec"]["nodePools"])}
        yield pools
        self.change_policy(nodePools=list(pools.values()))

    def policy(self, name: str = "default") -> dict[str, Any]:
        item = self.world.get(POLICY, "", name)
        assert item is not None
        return item

    async def reached(self, state: str, *names: str, **how: Any) -> int:
        """Tick until all of these jobs are in the state; how many ticks it took."""
        return await self.until(lambda: all(self.state(name) == state for name in names), **how)

    async def running(self, *names: str, **how: Any) -> int:
        """The same of ``Running``."""
        return await self.reached("Running", *names, **how)

    async def ticks(self, count: int, **how: Any) -> None:
        for _ in range(count):
            await self.tick(**how)

    def item(self, name: str) -> dict[str, Any]:
        """The TrainingJob as it is stored."""
        item = self.world.get(JOB, NAMESPACE, name)
        assert item is not None
        return item

    def status(self, name: str) -> TrainingJobStatus:
        return read_job_status(self.item(name))

    def condition(self, name: str, kind: str) -> Any:
        """Of the job; None: it has none of the kind."""
        return self.status(name).condition(kind)

    async def refused(self, name: str, reason: str, *words: str) -> None:
        """Tick until the job is told of its admission; it is refused for this reason, in these words."""
        await self.until(lambda: self.condition(name, "Admitted") is not None)
        found = self.condition(name, "Admitted")
        assert (found.is_true, found.reason) == (False, reason), found
        assert all(part in found.message for part in words), found.message

    def explained(self, name: str) -> str:
        """The job as ``ballast explain`` tells of it."""
        return as_text(explanation(self.item(name), self.pods(name), [self.policy()], []))

    def plan(self, name: str) -> Plan:
        return Plan.from_json(self._planned(name)[PLAN_KEY])

    def cut(self, name: str) -> tuple[int, ...]:
        """Layers of each stage of the job's plan, in the model's order."""
        stages = sorted(self.plan(name).stages, key=lambda stage: stage.first_layer)
        return tuple(stage.end_layer - stage.first_layer for stage in stages)

    def configuration(self, name: str) -> JobConfig:
        """What the ranks of the job's launch read."""
        return JobConfig.from_json(self._planned(name)[CONFIG_KEY])

    def _planned(self, name: str) -> dict[str, str]:
        item = self.world.get(CONFIG_MAP, NAMESPACE, plan_config_map_name(name))
        assert item is not None
        return item["data"]

    def never_restarted(self, *names: str) -> bool:
        """Whether each of the jobs has had one launch, and lost no step."""
        found = [self.status(name) for name in names]
        return all((one.launches, dict(one.restarts), one.lost_steps) == (1, {}, 0) for one in found)

    def pool(self, name: str) -> str:
        """Where the job holds GPUs; empty: it holds none."""
        allocation = self.status(name).allocation
        return "" if allocation is None else allocation.pool

    def nodes(self, name: str) -> set[str]:
        """On which pods of the job are bound."""
        return {pod["spec"]["nodeName"] for pod in self.pods(name) if "nodeName" in pod["spec"]}

    def present(self) -> list[str]:
        """Names of the jobs that are not deleted."""
        return [item["metadata"]["name"] for item in self.world.items(JOB)]

    def costs(self) -> Costs:
        """As ``ballast cost`` has them now."""
        return costs(self.world.items(JOB), [self.policy()], now=self.now)

    def policy_condition(self, kind: str, name: str = "default") -> dict[str, Any] | None:
        """Of a ClusterPolicy; None: it has none of the kind."""
        conditions = self.policy(name).get("status", {}).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), None)

    def die_at(self, write: int) -> None:
        """The operator dies when this write has landed; for the world that is before the next one."""

        def die(number: int) -> None:
            if number == write:
                self.died_at = f"died after write {number}: {self.world.log[-1]}"
                raise Crash

        self.world.after_write = die

    def state(self, name: str) -> str:
        return self.item(name).get("status", {}).get("state", "")

    def all_statuses(self) -> dict[str, Any]:
        return {item["metadata"]["name"]: item.get("status") for item in self.world.items(JOB)}

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Pods of the job that live."""
        return [
            pod
            for pod in self.world.items(POD)
            if pod["metadata"]["labels"].get(JOB_LABEL) == name
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
        ]

    def set_node_ready(self, name: str, ready: bool) -> None:
        condition = [{"type": "Ready", "status": "True" if ready else "Unknown"}]
        self.world.patch(NODE, "", name, {"status": {"conditions": condition}})
