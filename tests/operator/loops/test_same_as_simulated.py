"""The simulator and the operator's loops decide the same, moment by moment, on clusters that have everything.

The loops play first: objects, watches, passes, pods that start and stop, ranks that acknowledge. What they
saw of jobs and nodes is played again on the simulator's clock, which has a memory, placements and round ends
of its own.
"""

import dataclasses
import datetime
import functools
import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
from ballast_operator.allocator.decider import scheduling_policy
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.read import read_cluster_policy
from ballast_operator.kube.kinds import JOB, NODE
from ballast_policies.contract import Plan, Report
from ballast_policies.rounds.values import Placement
from ballast_policies.scheduling import ClusterJob
from ballast_policies.simulator.clock import Answer, Clock, Event
from ballast_policies.simulator.decisions import OperatorDecisions, SimulatedGang

from tests.operator.loops.simulated.machines import Trainer
from tests.operator.loops.simulated.simulation import START, Simulation
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
NODES = {"sure-0": 4, "east-0": 4, "slow-0": 2, "slow-1": 2, "pairs-0": 2, "pairs-1": 2}
PER_GPU = {"v100": 4.0, "k80": 1.0, "t4": 2.0}
LONG = 10_000_000


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


def drawn_job(draw: random.Random) -> dict[str, Any]:
    """A gang, an elastic one, one that may be in several pools, or a job that may share its GPU."""
    kind = draw.choice(["gang", "gang", "elastic", "mixed", "shares"])
    fields: dict[str, Any] = {"totalSteps": LONG, "weight": draw.choice([1, 1, 2])}
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
class Moment:
    """What the loops decided on, and what had come of it when nothing happened any more.

    Attributes:
        at: seconds.
        snapshots: the first, and those with other jobs: one that waits for room of its tenant is there once
            the pods that had it are gone.
        running: where gangs were then.
        round_ends: epoch seconds.
    """

    at: float
    snapshots: Sequence[Snapshot]
    running: Mapping[str, Placement]
    round_ends: float | None

    @property
    def times(self) -> list[tuple[float, Snapshot]]:
        """Each snapshot with a time of its own, so close that it makes no difference."""
        return [(self.at + number * 1e-4, each) for number, each in enumerate(self.snapshots)]


class Recorded:
    """The snapshots of the loops' decisions, in their order."""

    def __init__(self, simulation: Simulation) -> None:
        self.snapshots: list[Snapshot] = []
        decider = simulation.allocator.decider
        build = decider.build_problem

        def recording(*args: Any, **kwargs: Any) -> Any:
            pending = build(*args, **kwargs)
            self.snapshots.append(pending.snapshot)
            return pending

        decider.build_problem = recording


def names(snapshot: Snapshot) -> list[str]:
    return [job.name for job in snapshot.jobs]


async def settled(simulation: Simulation, recorded: Recorded) -> Moment:
    """Decide, and let everybody do what follows from that, in no time."""
    first, alike, before = len(recorded.snapshots), 0, None
    for _ in range(60):
        simulation.asked = True
        await simulation.tick(seconds=0.0)
        statuses = simulation.all_statuses()
        running = dict(recorded.snapshots[-1].running)
        states = {name: (status or {}).get("state") for name, status in statuses.items()}
        now = running, states, {name: len(simulation.pods(name)) for name in statuses}
        alike = alike + 1 if now == before else 0
        before = now
        if alike >= 4 and set(states.values()) <= {"Running", "Waiting", "Suspended"}:
            break
    return Moment(
        at=(simulation.now - START).total_seconds(),
        snapshots=[
            each
            for number, each in enumerate(recorded.snapshots[first:], first)
            if number == first or names(each) != names(recorded.snapshots[number - 1])
        ],
        running=running,
        round_ends=simulation.allocator.decider.memory.next_at,
    )


async def played(seed: int, objective: str) -> tuple[Simulation, list[Moment]]:
    """Jobs come and go, nodes are cordoned and come back, rounds end."""
    draw = random.Random(seed)
    simulation = drawn_cluster(draw, objective)
    recorded, moments, there = Recorded(simulation), list[Moment](), list[str]()
    for number in range(14):
        event = draw.choice(["come", "come", "come", "go", "cordon", "nothing"])
        if event == "come" or number < 6 or not there:
            name = f"job-{number:02d}"
            simulation.add_job(name, **drawn_job(draw))
            simulation.trainers[name] = Unmeasured("team", name, total=LONG, pace=1)
            there.append(name)
        elif event == "go":
            gone = there.pop(draw.randrange(len(there)))
            simulation.world.patch(JOB, "team", gone, {"spec": {"suspend": True}})
        elif event == "cordon":
            node = draw.choice(list(NODES))
            closed = bool(simulation.world.get(NODE, "", node)["spec"].get("unschedulable"))
            simulation.world.patch(NODE, "", node, {"spec": {"unschedulable": not closed}})
        moments.append(await settled(simulation, recorded))
        end = simulation.now + datetime.timedelta(
            seconds=draw.choice([5.0] if number < 5 else [10.0, 45.0, 130.0])
        )
        while (at := simulation.allocator.next_at) is not None and at < end.timestamp():
            simulation.now = max(simulation.now, datetime.datetime.fromtimestamp(at, datetime.UTC))
            moments.append(await settled(simulation, recorded))
        simulation.now = end
    return simulation, moments


@dataclasses.dataclass(slots=True, kw_only=True)
class KnownGang(SimulatedGang):
    """A gang of the simulator; what is known of the job, beside where it is, is the operator's."""

    known: ClusterJob

    def as_cluster_job(self, now: float) -> ClusterJob:
        return dataclasses.replace(
            self.known,
            launches=self.starts,
            placement=self.placement,
            running_since=START.timestamp() + self.since if self.placement is not None else 0.0,
            beside_speed=self.beside_speed,
        )


def gang(job: ClusterJob) -> KnownGang:
    return KnownGang(
        name=job.name,
        remaining=LONG,
        speed_at=lambda at: 0.0,
        restart_seconds=0.0,
        pause_seconds=0.0,
        known=job,
    )


def arrivals(moments: Sequence[Moment]) -> Iterator[tuple[float, KnownGang]]:
    """Jobs at the moments at which the loops first had them."""
    known: Collection[str] = ()
    for at, snapshot in itertools.chain.from_iterable(moment.times for moment in moments):
        yield from ((at, gang(job)) for job in snapshot.jobs if job.name not in known)
        known = names(snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("objective", first_daily(["hierarchical", "min-cost", "max-min-fairness", "fifo"]))
@pytest.mark.parametrize("seed", first_daily([3, 0, 1, 2, 4, 5], 1))
async def test_the_simulator_decides_as_the_loops_do(seed: int, objective: str):
    """At every moment: who runs, where, and when the round ends."""
    simulation, moments = await played(seed, objective)
    policy = read_cluster_policy({**simulation.policy(), "status": {}})
    decisions = OperatorDecisions[KnownGang](
        moments[0].snapshots[0], scheduling_policy(policy), began=START.timestamp()
    )
    found: dict[float, tuple[dict[str, Placement], float]] = {}
    order: list[str] = []

    def decide(present: Mapping[str, KnownGang], now: float) -> Answer:
        # Jobs that came at the same time are served in the order in which they are given.
        answer = decisions({name: present[name] for name in order if name in present}, now)
        found[now] = dict(answer.round.placements), START.timestamp() + answer.until
        return answer

    def learn(snapshot: Snapshot) -> None:
        decisions.state = snapshot
        order[:] = names(snapshot)
        jobs = {job.name: job for job in snapshot.jobs}
        for name, known in list(clock.present.items()):
            if name in jobs:
                known.known = jobs[name]
            else:
                del clock.present[name]

    clock = Clock[KnownGang](
        arrivals=arrivals(moments),
        decide=decide,
        ended=lambda job, now: None,
        events=[
            Event(at=at, happens=functools.partial(learn, snapshot))
            for moment in moments
            for at, snapshot in moment.times
        ],
    )
    clock.run(moments[-1].at + 1.0)
    for moment in moments:
        at, snapshot = moment.times[-1]
        if snapshot.jobs:
            assert found[at] == (dict(moment.running), moment.round_ends), moment.at
