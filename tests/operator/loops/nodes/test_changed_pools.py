"""Pools are renamed, split, merged, removed and given another GPU type while gangs run in them."""

import asyncio
import copy
from collections import Counter

import pytest
from ballast_operator.kube.kinds import JOB, NODE, POLICY
from ballast_operator.views.clock import show
from ballast_policies.contract.messages import GPU_RESOURCE
from ballast_policies.protocol.observed import Action
from hypothesis import example, given
from hypothesis import strategies as st

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, job
from tests.operator.loops.simulated.world import World
from tests.support.examples import examples

ENDLESS = {"totalSteps": 100_000}
ONE = {"stages": (1, 1), **ENDLESS}
MOVES = st.fixed_dictionaries(
    {
        "minRunSeconds": st.sampled_from([0, 900]),
        "maxMovesPerHour": st.sampled_from([0, 2, 12, 1000]),
    }
)


def named(simulation: Simulation, **names: str) -> None:
    """Rename pools, in the one edit of the ClusterPolicy that people make."""
    with simulation.changed_pools() as pools:
        for old, new in names.items():
            pools[old]["name"] = new


def pools_of(simulation: Simulation) -> dict[str, str]:
    """Job -> pool that its status names."""
    return {
        name: held.pool
        for name in simulation.trainers
        if (held := simulation.status(name).allocation) is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("moves", [{"minRunSeconds": 900}, {"minRunSeconds": 0, "maxMovesPerHour": 0}])
async def test_a_renamed_pool_keeps_its_gangs_and_takes_new_ones(moves):
    """No gang restarts, statuses have the new name, new jobs are admitted; also when it is renamed back."""
    simulation = Simulation(nodes={"n0": ("a", 4), "n1": ("b", 1)}, roundSeconds=10, moves=moves)
    for name in ("one", "two"):
        simulation.add_job(name, gpuTypes=["a"], **ONE)
    simulation.add_job("other", gpuTypes=["b"], **ONE)
    await simulation.running(*simulation.trainers)
    for number, (old, new) in enumerate([("a", "renamed"), ("renamed", "a")]):
        named(simulation, **{old: new})
        late = f"late-{number}"
        await simulation.run_job(late, gpuTypes=["a"], **ONE)
        await simulation.tick(seconds=11)
        assert pools_of(simulation) == {name: "b" if name == "other" else new for name in simulation.trainers}
    assert {simulation.status(name).launches for name in simulation.trainers} == {1}
    held = {entry["pool"]: entry["gpusHeld"] for entry in status(simulation)["capacity"]}
    assert held == {"a": 4, "b": 1}


def status(simulation: Simulation) -> dict:
    return simulation.policy()["status"]


@pytest.mark.slow
async def test_a_gang_on_both_sides_of_a_split_is_started_in_one_of_them():
    """Those on one side train on; the one on both is told why it moves, and new jobs are admitted."""
    nodes = {"n0": ("a", 2), "n1": ("a", 2), "n2": ("a", 3)}
    simulation = Simulation(nodes=nodes, roundSeconds=10, moves={"minRunSeconds": 900})
    await simulation.run_job("both", stages=(4, 4), **ENDLESS)
    await simulation.run_job("side", stages=(1, 1), **ENDLESS)
    apart = next(name for name in simulation.status("both").allocation.nodes if name != "n2")
    simulation.world.patch(NODE, "", apart, {"metadata": {"labels": {"pool": "a2"}}})
    with simulation.changed_pools() as pools:
        pools["a2"] = {"name": "a2", "nodeSelector": {"pool": "a2"}, "gpuType": "a"}
    simulation.add_job("new", stages=(1, 1), **ENDLESS)
    await simulation.until(lambda: simulation.status("both").allocation.ending is not None)
    why = "it held 4 x a of pool a: its nodes are not in such a pool of the ClusterPolicy any more"
    assert why in simulation.status("both").allocation.ending.message
    await simulation.until(
        lambda: simulation.state("new") == "Running" and simulation.status("both").launches == 2
    )
    assert simulation.status("side").launches == 1


NO_LABELS = {"metadata": {"labels": {"pool": None}}}, {"metadata": {"labels": {"pool": "a"}}}
NO_GPUS = {"status": {"allocatable": {GPU_RESOURCE: "0"}}}, {"status": {"allocatable": {GPU_RESOURCE: "2"}}}


@pytest.mark.parametrize(("lost", "back"), [NO_LABELS, NO_GPUS], ids=["labels", "GPUs"])
async def test_a_gang_outlives_the_loss_of_its_nodes_labels_or_gpus(lost, back, monkeypatch):
    """What labels nodes, or a device plugin, is replaced: nothing is started meanwhile, nothing stopped."""
    monkeypatch.setattr(World, "checked", lambda self: None)  # pods of GPUs that the node does not offer now
    simulation = Simulation(nodes={"n0": ("a", 2)}, roundSeconds=10)
    await simulation.run_job("one", **ONE)
    simulation.world.patch(NODE, "", "n0", lost)
    simulation.add_job("new", **ONE)
    await simulation.until(lambda: simulation.state("new") == "Waiting")
    await simulation.ticks(30)
    assert simulation.state("new") == "Waiting" and simulation.status("one").launches == 1
    assert status(simulation)["capacity"][0]["gpusHeld"] == 1
    simulation.world.patch(NODE, "", "n0", back)
    await simulation.running("new")
    assert (simulation.state("one"), simulation.status("one").launches) == ("Running", 1)
    # Its pool is gone as well: it moves.
    with simulation.changed_pools() as pools:
        pools["a"] |= {"name": "b", "nodeSelector": {"pool": "b"}}
    await simulation.until(lambda: simulation.status("one").allocation is None)


class Pools:
    """Pools of nodes that are told apart by one label each, and 40 jobs whose gangs do as they are told."""

    def __init__(self, moves: dict[str, int]) -> None:
        nodes = {f"n{i}": (f"p{i % 4}", 1 + i % 4) for i in range(16)}
        self.simulation = Simulation(nodes=nodes, roundSeconds=60, moves=moves)
        self.gpus = {name: gpus for name, (_, gpus) in nodes.items()}
        self.pools = self.policy()["spec"]["nodePools"]
        for pool in self.pools:
            pool["gpuType"] = "fast" if pool["name"] in ("p0", "p1") else "slow"
        self.names = 4
        self.limit, self.moved = moves["maxMovesPerHour"], 0
        self.held: dict[str, dict] = {}
        self.launches: Counter[str] = Counter()
        kinds = [{"stages": (1, 1)}, {"stages": (2, 2)}, {"stages": (1, 4), "grow": True}]
        kinds += [{"stages": (3, 3)}, {"stages": (2, 6), "mixedPools": "Allowed"}]
        kinds[4]["model"] = {"name": "gpt", "layers": 12}
        self.specs = {f"j{i:02}": {**kinds[i % 5], "totalSteps": 100_000} for i in range(40)}
        self.write()

    def policy(self) -> dict:
        return copy.deepcopy(self.simulation.policy())

    def write(self) -> None:
        """What there is, as the API server has it."""
        policy = self.policy()
        policy["spec"]["nodePools"] = copy.deepcopy(self.pools)
        self.simulation.world.put(POLICY, policy)
        for name, spec in self.specs.items():
            item = job(name, **spec)
            item["metadata"] |= (self.simulation.world.get(JOB, NAMESPACE, name) or item)["metadata"]
            item["status"] = {"launches": self.launches[name]}
            if name in self.held:
                item["status"]["allocation"] = self.held[name]
            self.simulation.world.put(JOB, item)

    def change(self, kind: str, at: int) -> set[str]:
        """Change a pool; names of those that were there before and are not what they were."""
        pool = self.pools[at % len(self.pools)]
        label, touched = pool["nodeSelector"]["pool"], {pool["name"]}
        self.names += 1
        fresh = f"p{self.names}"
        labelled = [n for n in self.gpus if self.label(n) == label]
        if kind == "rename":
            pool["name"] = fresh
        elif kind == "split":
            for name in labelled[::2]:
                self.simulation.world.patch(NODE, "", name, {"metadata": {"labels": {"pool": fresh}}})
            self.pools.append({**pool, "name": fresh, "nodeSelector": {"pool": fresh}})
        elif kind == "retype":
            pool["gpuType"] = "slow" if pool["gpuType"] == "fast" else "fast"
        elif len(self.pools) > 1:
            self.pools.remove(pool)
            if kind == "merge":
                into = self.pools[at % len(self.pools)]
                touched.add(into["name"])
                for name in labelled:
                    labels = {"pool": into["nodeSelector"]["pool"]}
                    self.simulation.world.patch(NODE, "", name, {"metadata": {"labels": labels}})
        return touched

    def label(self, node: str) -> str:
        return self.simulation.world.get(NODE, "", node)["metadata"]["labels"]["pool"]

    async def decide(self, touched: set[str], *, boundary: bool) -> None:
        """One decision, and what it promises; gangs do at once what it says."""
        self.write()
        self.simulation.asked = True
        if boundary:
            self.simulation.now = self.simulation.now.fromtimestamp(
                (self.simulation.allocator.next_at or self.simulation.now.timestamp()) + 1,
                self.simulation.now.tzinfo,
            )
        await self.simulation.look()
        await self.simulation.decide()
        was, disturbed = dict(self.held), set()
        for name in self.specs:
            told = self.simulation.observer.decided.assignments[NAMESPACE, name]
            assert told.reason != "WaitingForPolicy"
            if told.action is Action.PLACE:
                self.launches[name] += 1
                self.held[name] = self.allocation(name, told.placement)
            elif told.action is Action.RELEASE:
                self.held.pop(name, None)
            else:
                self.resize(name, told)
                continue
            if name in was and not touched & {p["pool"] for p in [was[name], *was[name].get("parts", [])]}:
                disturbed.add(name)
        if not boundary:
            assert not disturbed
        self.moved += len(disturbed)
        assert self.moved <= self.limit
        used = Counter(node for held in self.held.values() for node in held["nodes"])
        assert all(count <= self.gpus[node] for node, count in used.items())

    def allocation(self, name: str, placement) -> dict:
        launch = self.launches[name]
        pods = [f"{name}-{launch}-{rank}" for rank in range(len(placement.nodes))]
        left, parts = list(pods), []
        for part in placement.parts:
            mine, left = left[: part.gpus], left[part.gpus :]
            parts.append({"pool": part.pool, "gpuType": part.gpu_type, "pods": mine})
        return {
            "launch": launch,
            "gpuType": placement.gpu_type,
            "pool": placement.pool,
            "gpus": len(pods),
            "pods": pods,
            "nodes": list(placement.nodes),
            "planId": "p",
            "since": show(self.simulation.now),
            **({"parts": parts} if parts else {}),
        }

    def resize(self, name: str, told) -> None:
        """A gang that goes on, by its pool's name of today, with the size that it is to have."""
        held = self.held[name]
        nodes = [*told.placement.nodes, *told.extra_nodes]
        if told.kept_pods:
            nodes = [node for pod, node in zip(held["pods"], nodes, strict=True) if pod in told.kept_pods]
        since = held["since"]
        told_of = copy.copy(told.placement)
        if len(nodes) != len(told.placement.nodes):
            told_of = type(told_of)(gpu_type=told_of.gpu_type, pool=told_of.pool, nodes=tuple(nodes))
        self.held[name] = {**self.allocation(name, told_of), "since": since}


CHANGES = st.tuples(
    st.sampled_from(["rename", "split", "merge", "remove", "retype", "none"]),
    st.integers(0, 7),
    st.booleans(),
)


@pytest.mark.slow
@examples(40)
@given(moves=MOVES, changes=st.lists(CHANGES, min_size=2, max_size=6))
@example(moves={"minRunSeconds": 0, "maxMovesPerHour": 0}, changes=[("split", 0, False)] * 2)
def test_whatever_becomes_of_pools_every_gang_is_decided_on(moves, changes):
    """No decision fails, no GPU is given twice, and gangs of pools that did not change are left alone."""

    async def played() -> None:
        world = Pools(moves)
        await world.decide(set(), boundary=False)
        for kind, at, boundary in changes:
            touched = set() if kind == "none" else world.change(kind, at)
            await world.decide(touched, boundary=boundary)

    asyncio.run(played())
