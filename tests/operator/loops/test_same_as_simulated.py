"""The simulator and the operator's loops decide the same, each time, on clusters that have everything.

The loops play first: objects, watches, passes, pods that start, stop and fail, nodes that go and come back,
ranks that acknowledge. What they saw of jobs and nodes, and when they decided, is played again on the
simulator's clock, which has a memory, placements and round ends of its own.
"""

import dataclasses
import datetime
import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ballast_operator.allocator.decider import MadeDecision, scheduling_policy
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.read import read_cluster_policy
from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_operator.views.notices import NODE_DELETED
from ballast_policies.contract.messages import ExitReason, Report, TerminationMessage
from ballast_policies.contract.plan import Plan
from ballast_policies.rounds.values import Node, Placement, Round
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.simulator.clock import Answer, Clock
from ballast_policies.simulator.decisions import OperatorDecisions, SimulatedGang

from tests.operator.loops.simulated.machines import Trainer, end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, START, Simulation, at
from tests.operator.loops.simulated.world import as_sent, merged
from tests.operator.loops.test_sharing import LABELS
from tests.support.examples import first_daily

POOLS = {
    "sure": {"gpuType": "v100", "capacityType": "onDemand", "pricePerGpuHour": 3.0},
    "east": {"gpuType": "v100", "capacityType": "spot", "pricePerGpuHour": 1.0},
    "slow": {"gpuType": "k80", "capacityType": "onDemand", "pricePerGpuHour": 0.5},
    "pairs": {
        "gpuType": "t4",
        "capacityType": "onDemand",
        "pricePerGpuHour": 0.4,
        "memoryPerGpu": "32G",
        "sharing": {"kind": "TimeSlicing", "jobsPerGpu": 2},
    },
}
NODES = {"sure-0": 4, "east-0": 4, "east-1": 2, "slow-0": 2, "slow-1": 2, "pairs-0": 2, "pairs-1": 2}
PER_GPU = {"v100": 4.0, "k80": 1.0, "t4": 2.0}
LONG = 10_000_000
NOTICE = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
GOING = "about to go"
"""What is said of a node that has such a mark."""


class Unmeasured(Trainer):
    """It reports no speed: what is known of jobs stays what they state."""

    def _report(self, plan: Plan) -> Report:
        return Report(
            epoch=plan.epoch, step=self.step, loss=1.0, steps_per_second=None, checkpoint_step=self.saved
        )


def throughput(*sizes: int) -> list[dict[str, Any]]:
    return [
        {"gpuType": kind, "stages": size, "stepsPerSecond": rate * size**0.9}
        for kind, rate in PER_GPU.items()
        for size in sizes
    ]


def drawn_job(draw: random.Random, objective: str) -> dict[str, Any]:
    """A gang, an elastic one, one that may be in several pools, or a job that may share its GPU."""
    kind = draw.choice(["gang", "gang", "elastic", "mixed", "shares"])
    fields: dict[str, Any] = {"totalSteps": LONG, "weight": draw.choice([1, 1, 2])}
    if objective == "min-cost-slo":
        fields["deadline"] = at(LONG / PER_GPU["v100"] * draw.choice([0.3, 0.6, 1.5, 4.0]))
    if kind == "elastic":
        return {**fields, "stages": (1, 4), "throughput": throughput(1, 2, 3, 4)}
    size = {"mixed": 4, "shares": 1}.get(kind) or draw.choice([1, 2, 4])
    fields |= {"stages": (size, size), "throughput": throughput(size)}
    if kind == "mixed":
        fields |= {"mixedPools": "Allowed", "model": {"name": "gpt", "layers": 12}}
    if kind == "shares":
        fields |= {"sharesGpu": "Allowed", "memoryPerGpu": "10G"}
    return fields


def drawn_cluster(draw: random.Random, objective: str) -> Simulation:
    nodes = {name: (name.split("-")[0], gpus) for name, gpus in NODES.items()}
    moves: dict[str, Any] = draw.choice([{}, {"minRunSeconds": 90}, {"maxMovesPerHour": 2}])
    spec = {
        "roundSeconds": 60,
        "objective": {"policy": objective},
        "moves": moves,
        "spot": {"onDemandShare": draw.choice([0.0, 0.4, 0.6])},
        "tenants": {"namespaces": {"team": {"maxGpus": draw.choice([8, 12, 40])}}},
        "nodePools": [{"name": name, "nodeSelector": {"pool": name}, **pool} for name, pool in POOLS.items()],
    }
    simulation = Simulation(nodes=nodes, **spec)
    for name in ("pairs-0", "pairs-1"):
        simulation.world.patch(NODE, "", name, {"metadata": {"labels": LABELS}})
    simulation.start_operator()
    return simulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A decision of the loops.

    Attributes:
        at: seconds.
        placements: who is to run where.
        round_ends: seconds.
    """

    at: float
    snapshot: Snapshot
    placements: Mapping[str, Placement]
    round_ends: float


class Recorded:
    """The loops' decisions, in their order."""

    def __init__(self, simulation: Simulation) -> None:
        self.seen: list[Seen] = []
        decider = simulation.allocator.decider
        keep = decider.keep

        def recording(made: MadeDecision) -> None:
            keep(made)
            assert made.decision.memory.next_at is not None
            self.seen.append(
                Seen(
                    at=(simulation.now - START).total_seconds(),
                    snapshot=made.of.snapshot,
                    placements=dict(made.decision.round.placements),
                    round_ends=made.decision.memory.next_at - START.timestamp(),
                )
            )

        decider.keep = recording


async def settled(simulation: Simulation, recorded: Recorded) -> None:
    """Decide, and let everybody do what follows from that, in no time."""
    alike, before = 0, None
    for _ in range(60):
        simulation.asked = True
        await simulation.tick(seconds=0.0)
        statuses = simulation.all_statuses()
        running = dict(recorded.seen[-1].snapshot.running)
        states = {name: (status or {}).get("state") for name, status in statuses.items()}
        now = running, states, {name: len(simulation.pods(name)) for name in statuses}
        alike = alike + 1 if now == before else 0
        before = now
        settled = set(states.values()) <= {"Running", "Waiting", "Suspended", "Failed"}
        if alike >= (4 if settled else 10):  # ranks whose peers are gone do not save: that takes its time
            return
    raise AssertionError(f"not settled: {states}")


class Machines:
    """Nodes that are cordoned, go and come back, and pods that fail, on a simulation's clock."""

    def __init__(self, simulation: Simulation, draw: random.Random) -> None:
        self._simulation, self._world, self._draw = simulation, simulation.world, draw
        self._nodes = {item["metadata"]["name"]: as_sent(item) for item in self._world.items(NODE)}
        for item in self._nodes.values():  # whoever comes in its place is another object
            del item["metadata"]["uid"]
        self._due: list[tuple[datetime.datetime, Callable[[], None]]] = []

    @property
    def next_at(self) -> float:
        """When a node, or what is left on it, goes next, epoch seconds; infinite: none does."""
        return min((at.timestamp() for at, _ in self._due), default=math.inf)

    def happen(self) -> None:
        """Do what is due."""
        due = [each for each in self._due if each[0] <= self._simulation.now]
        self._due = [each for each in self._due if each not in due]
        for _, happens in due:
            happens()

    def cordon(self) -> None:
        """A node is closed by hand, or opened again."""
        if name := self._one(there=True):
            closed = bool(self._get(name)["spec"].get("unschedulable"))
            self._world.patch(NODE, "", name, {"spec": {"unschedulable": not closed}})

    def delete(self) -> None:
        """A Node object goes; pods run on there until Kubernetes deletes them, unless it is back by then."""
        if name := self._one(there=True):
            self._world.drop(NODE, "", name)
            self._after(NODE_DELETED.seconds, lambda: self._get(name) or self._end_pods(name))

    def announce(self) -> None:
        """A spot machine is taken back: it says so, and is gone two minutes later."""
        if (name := self._one(there=True, of="east")) and not self._get(name)["spec"].get("taints"):
            self._world.patch(NODE, "", name, {"spec": {"taints": [NOTICE]}})
            uid = self._get(name)["metadata"]["uid"]
            self._after(120.0, lambda: self._take_back(name, uid))

    def restore(self) -> None:
        """A machine takes the place of one that is gone."""
        if name := self._one(there=False):
            self._end_pods(name)
            boot = {"nodeInfo": {"bootID": f"{self._world.version}"}}
            self._world.put(NODE, merged(self._nodes[name], {"status": boot}))

    def register(self) -> None:
        """A kubelet makes its Node object again: the machine was there all the time."""
        if name := self._one(there=False):
            self._world.put(NODE, self._nodes[name])

    def fail(self) -> None:
        """All pods on a node fail."""
        if name := self._one(there=True):
            message = TerminationMessage(
                reason=ExitReason.FAILED, message="CUDA error: uncorrectable ECC error"
            )
            for pod in self._pods(name):
                end_pod(self._world, NAMESPACE, pod, 1, message, self._simulation.now)

    def _one(self, *, there: bool, of: str = "") -> str:
        names = [
            name for name in self._nodes if (self._get(name) is not None) is there and name.startswith(of)
        ]
        return self._draw.choice(names) if names else ""

    def _get(self, name: str) -> Any:
        return self._world.get(NODE, "", name)

    def _pods(self, name: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self._world.items(POD) if pinned_node(pod) == name]

    def _end_pods(self, name: str) -> None:
        for pod in self._pods(name):
            self._world.drop(POD, NAMESPACE, pod)

    def _take_back(self, name: str, uid: str) -> None:
        if (node := self._get(name)) is None or node["metadata"]["uid"] == uid:
            self._world.drop(NODE, "", name)
            self._end_pods(name)

    def _after(self, seconds: float, happens: Callable[[], Any]) -> None:
        self._due.append((self._simulation.now + datetime.timedelta(seconds=seconds), happens))


async def played(seed: int, objective: str) -> tuple[Simulation, list[Seen]]:
    """Jobs come and go, nodes are cordoned, go and come back, pods fail, rounds end."""
    draw = random.Random(seed)
    simulation = drawn_cluster(draw, objective)
    machines = Machines(simulation, draw)
    recorded, there = Recorded(simulation), list[str]()
    of_nodes = {
        name: getattr(machines, name)
        for name in ("cordon", "delete", "announce", "restore", "register", "fail")
    }
    for number in range(18):
        event = draw.choice(["come", "come", "come", "go", "nothing", *of_nodes])
        if number < 6 or not there:
            event = "come"
        if event == "come":
            name = f"job-{number:02d}"
            simulation.add_job(name, **drawn_job(draw, objective))
            simulation.trainers[name] = Unmeasured("team", name, total=LONG, pace=1)
            there.append(name)
        elif event == "go":
            gone = there.pop(draw.randrange(len(there)))
            simulation.world.patch(JOB, "team", gone, {"spec": {"suspend": True}})
        elif event in of_nodes:
            of_nodes[event]()
        await settled(simulation, recorded)
        end = simulation.now + datetime.timedelta(
            seconds=draw.choice([5.0] if number < 5 else [10.0, 45.0, 130.0])
        )
        while (at := min(simulation.allocator.next_at or math.inf, machines.next_at)) < end.timestamp():
            simulation.now = max(simulation.now, datetime.datetime.fromtimestamp(at, datetime.UTC))
            machines.happen()
            await settled(simulation, recorded)
        simulation.now = end
    return simulation, recorded.seen


@dataclasses.dataclass(slots=True, kw_only=True)
class KnownGang(SimulatedGang):
    """A gang of the simulator; what is known of the job, beside where it is, is the operator's.

    Attributes:
        under_way: what was decided of it last has not been seen yet: pods have to go, or to start. Until then
            it is where the operator sees it.
    """

    known: ClusterJob
    under_way: bool = False

    def follow(self, decided: Round, now: float) -> None:
        SimulatedGang.follow(self, decided, now)
        self.under_way = self.placement != self.known.placement

    def changes_in(self, now: float) -> float:
        return math.inf

    def see(self, job: ClusterJob, now: float, nodes: Mapping[str, Node]) -> None:
        """The operator knows more; nobody decides when a gang is off nodes that go, or are gone."""
        held = [at.nodes for at in (self.placement, job.placement) if at is not None]
        if any(name not in nodes or nodes[name].closed.startswith(GOING) for at in held for name in at):
            self.placement = self.trains_on = job.placement
        if job.placement == self.placement:
            self.under_way = False
        assert self.under_way or job.placement == self.placement, f"{job.name} at {now}: not as decided"
        if job.launches > self.known.launches:
            self.since = now
        self.known = job

    def as_cluster_job(self, now: float) -> ClusterJob:
        job = dataclasses.replace(self.known, beside_speed=self.beside_speed)
        if self.under_way:
            return job
        since = START.timestamp() + round(self.since, 3) if self.placement is not None else 0.0
        return dataclasses.replace(job, placement=self.placement, running_since=since)


def gang(job: ClusterJob) -> KnownGang:
    return KnownGang(
        name=job.name,
        remaining=LONG,
        speed_at=lambda at: 0.0,
        restart_seconds=0.0,
        pause_seconds=0.0,
        placement=job.placement,
        known=job,
    )


MOMENT = 1e-5
"""Seconds between two decisions of one moment, on the simulator's clock alone."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", first_daily(["hierarchical", "min-cost", "max-min-fairness", "fifo", "min-cost-slo"])
)
@pytest.mark.parametrize("seed", first_daily(range(8)))
async def test_the_simulator_decides_as_the_loops_do(seed: int, objective: str):
    """At every decision: who is to run, where, and when the round ends."""
    simulation, seen = await played(seed, objective)
    policy = read_cluster_policy({**simulation.policy(), "status": {}})
    decisions = OperatorDecisions[KnownGang](
        seen[0].snapshot, scheduling_policy(policy), began=START.timestamp()
    )
    found: list[tuple[float, Mapping[str, Placement], float]] = []

    def decide(present: Mapping[str, KnownGang], now: float) -> Answer:
        # Jobs that came at the same time are served in the order in which they are given.
        order = [job.name for job in decisions.state.jobs]
        answer = decisions({name: present[name] for name in order}, round(now, 3))
        found.append((round(now, 3), answer.round.placements, answer.until))
        return answer

    def learn(one: Seen) -> None:
        decisions.state = one.snapshot
        nodes = {node.name: node for node in one.snapshot.capacity.nodes}
        for name, there in list(clock.present.items()):
            job = one.snapshot.by_name.get(name)
            if job is None:
                del clock.present[name]
                continue
            there.see(job, one.at, nodes)

    times = [
        at + number * MOMENT
        for at, decided in itertools.groupby(seen, key=lambda one: one.at)
        for number, _ in enumerate(decided)
    ]
    clock = Clock[KnownGang](
        arrivals=[
            (at, gang(job))
            for at, one, last in zip(times, seen, [None, *seen], strict=False)
            for job in one.snapshot.jobs
            if last is None or job.name not in last.snapshot.by_name
        ],
        decide=decide,
        ended=lambda job, now: None,
        events=[(at, functools.partial(learn, one)) for at, one in zip(times, seen, strict=True)],
    )
    clock.run(times[-1] + MOMENT)
    for one, answer in zip((one for one in seen if one.snapshot.jobs), found, strict=True):
        assert answer == (one.at, one.placements, one.round_ends)
