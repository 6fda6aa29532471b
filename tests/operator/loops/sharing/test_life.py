"""Two jobs on one GPU: launch, partner's end, and what stays alone."""

from typing import Any

from ballast_operator.kube.kinds import NODE, POLICY

from tests.operator.loops.sharing.shared_nodes import one_job, sharing_cluster


def together(simulation: Any) -> set[str]:
    return {
        name
        for name in simulation.trainers
        if (held := simulation.status(name).allocation) is not None and held.partner
    }


async def test_two_jobs_share_a_gpu_and_the_third_waits():
    """Each asks for one replica of the node, pays half, and names the other."""
    simulation = sharing_cluster("n")
    for name in ("a", "b", "c"):
        simulation.add_job(name, **one_job())
    await simulation.until(lambda: together(simulation) == {"a", "b"})
    await simulation.until(lambda: simulation.state("b") == "Running")
    status = simulation.status("a")
    assert status.allocation.partner == "team/b"
    (pod,) = simulation.pods("a")
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert simulation.status("c").launches == 0
    for _ in range(70):  # the decision of a is told with the next round
        await simulation.tick()
    assert "team/a" in simulation.status("b").last_decision.why
