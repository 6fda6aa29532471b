"""Racks by labels of nodes: gangs that require one, and what they are told."""

from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.simulation import Simulation

BLOCK, RACK = "example.com/block", "example.com/rack"
LEVELS = {"topology": {"levels": [{"nodeLabel": BLOCK}, {"nodeLabel": RACK}]}}
LONG = {"totalSteps": 100_000}


def racks(*gpus: int) -> Simulation:
    """A rack for each entry, of two nodes with so many GPUs each; racks 0 and 1 are in block b0."""
    nodes = {f"r{rack}-{i}": ("fast", has) for rack, has in enumerate(gpus) for i in range(2)}
    simulation = Simulation(nodes=nodes, **LEVELS)
    for name in nodes:
        rack = int(name[1])
        labels = {"pool": "fast", BLOCK: f"b{rack // 2}", RACK: f"r{rack}"}
        simulation.world.patch(NODE, "", name, {"metadata": {"labels": labels}})
    return simulation


def racks_of(simulation: Simulation, name: str) -> set[str]:
    allocation = simulation.status(name).allocation
    return set() if allocation is None else {node[:2] for node in allocation.nodes}


def waits(simulation: Simulation, name: str, words: str) -> bool:
    found = simulation.condition(name, "Admitted")
    return found is not None and not found.is_true and words in found.message


async def test_a_gang_starts_and_grows_in_one_rack():
    """Another job has the other rack for a while: the gang does not grow there when it is free."""
    simulation = racks(2, 2)
    await simulation.run_job("other", stages=(2, 2), **LONG)
    await simulation.run_job("near", stages=(2, 8), topology={"required": RACK}, **LONG)
    first = racks_of(simulation, "near")
    assert len(first) == 1 and first != racks_of(simulation, "other")
    await simulation.until(lambda: len(simulation.status("near").allocation.nodes) == 4)
    await simulation.suspended("other")
    for _ in range(40):
        await simulation.tick()
        assert racks_of(simulation, "near") == first
    assert f"in domain b0/{min(first)} of {RACK}" in simulation.status("near").last_decision.why


async def test_who_waits_for_a_domain_is_told_of_the_largest():
    """One that no rack could hold, one that has to wait for it, one that names no level; a block holds it."""
    simulation = racks(2, 2)
    simulation.add_job("wide", stages=(6, 6), topology={"required": RACK})
    simulation.add_job("lost", stages=(1, 1), topology={"preferred": "rack"})
    await simulation.until(
        lambda: waits(
            simulation,
            "wide",
            f"needs 6 GPUs of one pool, in one domain of {RACK}; its pools have in one domain at most: "
            "fast 4. To fix: lower pipeline.minStages, topology.preferred in place of required, or add nodes",
        )
    )
    await simulation.refused("wide", "ExceedsCapacity")
    unknown = f"topology.preferred=rack is none of the ClusterPolicy's topology.levels ({BLOCK}, {RACK})"
    await simulation.until(lambda: waits(simulation, "lost", unknown))
    simulation.change("lost", topology={"preferred": RACK})
    simulation.change("wide", topology={"required": BLOCK})
    await simulation.running("wide")
    assert racks_of(simulation, "wide") == {"r0", "r1"}


async def test_a_gang_stays_when_its_level_is_taken_out_of_the_policy():
    """As it is, in its size too: the level counts at the next launch, which waits and is told."""
    simulation = racks(2, 2)
    await simulation.run_job("near", stages=(2, 4), topology={"required": RACK}, **LONG)
    await simulation.until(lambda: len(simulation.status("near").allocation.nodes) == 4)
    before = simulation.status("near").allocation.nodes
    simulation.change_policy(topology=None)
    await simulation.ticks(26, seconds=5.0)
    status = simulation.status("near")
    assert (status.state, status.launches, status.allocation.nodes) == ("Running", 1, before)
    await simulation.suspended("near")
    simulation.change("near", suspend=False)
    words = f"topology.required={RACK} is none of the ClusterPolicy's topology.levels (it has none)"
    await simulation.until(lambda: waits(simulation, "near", words))


async def test_a_level_that_no_node_has_is_told():
    """A label that is misspelt would make each node a domain of its own without a word."""
    simulation = Simulation(nodes={"a": ("fast", 1)}, **LEVELS)
    simulation.world.patch(NODE, "", "a", {"metadata": {"labels": {BLOCK: "b0"}}})

    await simulation.tick()
    assert simulation.policy_condition("Valid")["message"] == f"no node has label {RACK} of topology.levels"
    simulation.world.patch(NODE, "", "a", {"metadata": {"labels": {RACK: "r0"}}})
    await simulation.tick(decides=True)
    assert simulation.policy_condition("Valid")["message"] == "1 pools, 1 nodes"


async def test_a_gang_waits_until_a_rack_is_free():
    """Two GPUs are free, of two racks: it waits, is told so, and starts when one of the racks is."""
    simulation = racks(2, 2)
    for name in ("a", "b"):
        simulation.add_job(name, stages=(3, 3), topology={"required": RACK}, **LONG)
    await simulation.running(*"ab")
    simulation.add_job("near", stages=(2, 2), topology={"required": RACK}, weight=1e-3, **LONG)
    words = "2 of 8 fast free in pool fast, at most 1 of them in one domain, b0/r1"
    await simulation.until(lambda: waits(simulation, "near", words))
    free = racks_of(simulation, "a")
    simulation.change("a", suspend=True)
    await simulation.running("near")
    assert racks_of(simulation, "near") == free
