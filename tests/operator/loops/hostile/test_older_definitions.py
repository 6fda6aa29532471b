"""Custom resource definitions that are older than the operator: fields of statuses are dropped."""

from ballast_operator.kube.kinds import JOB
from ballast_operator.waits import WaitReason

from tests.operator.loops.simulated.simulation import Simulation

LACKING = frozenset({"observedGeneration", "lastDecision", "jobsRunning"})
"""Of jobs and of the ClusterPolicy; what a job has in each status."""


async def after(lacking: frozenset[str]) -> tuple[Simulation, list[str]]:
    """A job that runs, and the writes of statuses meanwhile."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)}, roundSeconds=10)
    simulation.world.lacking = lacking
    simulation.cluster.on_dropped = lambda kind, fields: simulation.waits.begin(
        WaitReason.DEFINITIONS, f"no {', '.join(fields)}", to_fix="install them", subject=kind.plural
    )
    simulation.add_job("one", stages=(1, 1), totalSteps=100_000)
    await simulation.running("one")
    simulation.world.log.clear()
    await simulation.ticks(100)
    return simulation, [line for line in simulation.world.log if line.endswith(" status")]


async def test_they_cost_no_writes_and_are_told_on_the_cluster_policy():
    """What is dropped differs from what is stored in each pass, and in each round."""
    right, usual = await after(frozenset())
    simulation, found = await after(LACKING)
    assert found == usual
    ready = simulation.policy_condition("Ready")
    assert ready["status"] == "True"
    assert ready["message"].endswith(
        "; no status.jobsRunning, status.observedGeneration. To fix: install them; "
        "no status.lastDecision, status.observedGeneration. To fix: install them"
    )
    assert right.policy_condition("Ready")["message"] in ready["message"]


async def test_definitions_that_are_brought_up_to_date_are_found_out():
    """The fields are written again once a watch has ended; then they are kept."""
    simulation, _ = await after(LACKING)
    assert not simulation.status("one").observed_generation
    simulation.world.lacking = frozenset()
    simulation.cluster.dropped.ask_again(JOB)
    await simulation.ticks(3)
    assert simulation.status("one").observed_generation == 1
