"""Anything may happen, in any order: the laws hold at each write, and once peace returns every job ends."""

import asyncio

import pytest
from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_policies.contract import ExitCode, ExitReason, TerminationMessage
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.operator.loops.simulated.machines import end_pod, node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.operator.loops.simulated.world import GPU, Crash, unavailable
from tests.support.examples import examples

NAMES = ("one", "two", "three")
NODES = ("a", "b")


class Chaos(RuleBasedStateMachine):
    """Two nodes, three jobs of which two fit, and trouble."""

    names = NAMES

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.dead_nodes: set[str] = set()

    def run(self, work) -> None:
        self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        self.simulation = Simulation(
            nodes={"a": ("fast", 2), "b": ("slow", 2)}, roundSeconds=30, moves={"maxMovesPerHour": 1000}
        )
        for name in NAMES:
            script = {"total": 240, "shrink_at": 60 if name == "one" else None}
            self.simulation.add_job(name, trainer=script, totalSteps=240, backoffLimit=1000)

    @rule(ticks=st.integers(1, 5), seconds=st.sampled_from([1.0, 7.0]))
    def time_passes(self, ticks, seconds) -> None:
        for _ in range(ticks):
            self.run(self.simulation.tick(seconds=seconds))

    @rule(ticks=st.integers(1, 4))
    def the_operator_is_away(self, ticks) -> None:
        for _ in range(ticks):
            self.run(self.simulation.tick(seconds=3.0, operator=False))

    @rule(writes=st.integers(0, 6))
    def the_operator_dies_soon(self, writes) -> None:
        last = self.simulation.world.writes + writes

        def die(number: int) -> None:
            if number >= last:
                self.simulation.world.after_write = lambda _: None
                raise Crash

        self.simulation.world.after_write = die

    @rule(writes=st.integers(0, 6))
    def an_answer_will_be_lost(self, writes) -> None:
        last = self.simulation.world.writes + writes

        def lose(number: int) -> None:
            if number >= last:
                self.simulation.world.after_write = lambda _: None
                unavailable(number)

        self.simulation.world.after_write = lose

    @rule(data=st.data(), code=st.sampled_from([1, 76, 137, 143]))
    def a_rank_dies(self, data, code) -> None:
        pods = [
            p["metadata"]["name"]
            for p in self.simulation.world.items(POD)
            if p["status"]["phase"] == "Running"
        ]
        if pods:
            message = TerminationMessage(reason=ExitReason.FAILED, message="boom") if code == 1 else None
            end_pod(self.simulation.world, NAMESPACE, data.draw(st.sampled_from(pods)), code, message)

    @rule(data=st.data())
    def someone_deletes_a_pod(self, data) -> None:
        pods = [p["metadata"]["name"] for p in self.simulation.world.items(POD)]
        if pods:
            stamp = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
            self.simulation.world.patch(POD, NAMESPACE, data.draw(st.sampled_from(pods)), stamp)

    @rule(number=st.integers(0, 2))
    def a_trainer_hangs(self, number) -> None:
        self.simulation.trainers[self.names[number % len(self.names)]].silent = True

    @rule(name=st.sampled_from(NODES))
    @precondition(lambda self: not self.dead_nodes)
    def a_node_is_lost(self, name) -> None:
        self.dead_nodes.add(name)
        self.simulation.set_node_ready(name, False)

    @rule(number=st.integers(0, 2), suspend=st.booleans())
    def a_user_suspends_or_resumes(self, number, suspend) -> None:
        name = self.names[number % len(self.names)]
        spec = self.simulation.world.get(JOB, NAMESPACE, name)["spec"]
        self.simulation.world.patch(JOB, NAMESPACE, name, {"spec": {**spec, "suspend": suspend}})

    def teardown(self) -> None:
        """Peace: nodes are back, trainers answer, no job is suspended; every job succeeds."""
        try:
            if hasattr(self, "simulation"):
                self.peace()
        finally:
            self.loop.close()

    def peace(self) -> None:
        simulation = self.simulation
        simulation.world.after_write = lambda _: None
        for name in self.dead_nodes:
            simulation.set_node_ready(name, True)
        for number, name in enumerate(self.names):
            simulation.trainers[name].silent = False
            self.a_user_suspends_or_resumes(number, False)
        everybody = lambda: all(simulation.state(name) == "Succeeded" for name in self.names)  # noqa: E731
        self.run(simulation.until(everybody, ticks=3000, seconds=4.0))
        for name in self.names:
            assert simulation.status(name).allocation is None
            assert simulation.pods(name) == []
            resumed = simulation.trainers[name].resumed_from
            assert resumed == sorted(resumed)


Chaos.TestCase.settings = examples(12, stateful_step_count=15, suppress_health_check=list(HealthCheck))
TestChaos = pytest.mark.slow(Chaos.TestCase)


class GrowingChaos(Chaos):
    """One job that takes what it can get, nodes that come and go, and trouble."""

    names = ("one",)

    @initialize()
    def begin(self) -> None:
        self.simulation = Simulation(
            nodes={"a": ("fast", 2), "b": ("fast", 0)}, roundSeconds=30, moves={"maxMovesPerHour": 1000}
        )
        self.simulation.add_job(
            "one", trainer={"total": 400}, totalSteps=400, backoffLimit=1000, stages=(1, 4), grow=True
        )
        self.time_passes(5, 1.0)
        # It grows in the next moments, whatever happens to it.
        self.simulation.world.put(NODE, node("b", "fast", 1))

    @rule(gpus=st.integers(0, 2))
    @precondition(lambda self: "b" not in self.dead_nodes)
    def a_node_has_more_gpus(self, gpus) -> None:
        had = int(self.simulation.world.get(NODE, "", "b")["status"]["allocatable"][GPU])
        self.simulation.world.put(NODE, node("b", "fast", max(had, gpus)))
        self.time_passes(2, 1.0)


GrowingChaos.TestCase.settings = examples(8, stateful_step_count=15, suppress_health_check=list(HealthCheck))
TestGrowingChaos = pytest.mark.slow(GrowingChaos.TestCase)
assert ExitCode.PEER_LOST == 76
