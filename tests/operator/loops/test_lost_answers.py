"""An answer of the API server is lost and the watches are late: nothing is decided on what is out of date."""

from ballast_operator.errors import Unavailable
from ballast_operator.kube.kinds import JOB
from ballast_operator.reconcile.reconciler import Requeue

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

KEY = (NAMESPACE, "one")


def lose_the_answer_when(simulation: Simulation, landed) -> None:
    def lose(number: int) -> None:
        if landed():
            simulation.world.after_write = lambda _: None
            raise Unavailable(f"the answer to write {number} was lost")

    simulation.world.after_write = lose


async def test_a_launch_whose_answer_is_lost_stays_reserved_until_the_status_is_read():
    """No other job counts on its GPUs; the next pass continues the launch, whatever the watch has told."""
    simulation = Simulation(nodes={"a": ("fast", 1)})
    simulation.add_job("one", stages=(1, 1))

    def stop_when_launched() -> bool:
        return simulation.status("one").allocation is not None

    lose_the_answer_when(simulation, stop_when_launched)
    passes = simulation.reconciler.reconcile
    reserved = []

    async def noted(key):
        try:
            return await passes(key)
        except Unavailable:
            reserved.append(simulation.observer.findings.reservations[key].pods)
            raise

    simulation.reconciler.reconcile = noted
    await simulation.until(lambda: bool(reserved))
    assert reserved == [("one-1-0",)]
    assert [pod["metadata"]["name"] for pod in simulation.pods("one")] == ["one-1-0"]
    assert simulation.observer.findings.reservations == {}
    assert simulation.status("one").launches == 1


async def test_gpus_are_not_freed_while_a_pod_exists_that_was_not_observed():
    """The answer to its creation was lost and the watch is late: it is found by a list before the release."""
    simulation = Simulation(nodes={"a": ("fast", 1)})
    simulation.add_job("one", stages=(1, 1))
    await simulation.until(lambda: bool(simulation.pods("one")))
    uid = simulation.pods("one")[0]["metadata"]["uid"]
    simulation.start_operator()  # it will know the job, and nothing of its pods
    status = simulation.status("one")
    ending = {"cause": "Preempted", "message": "", "since": "2026-01-01T00:00:00Z"}
    content = status.to_dict()
    content["allocation"]["ending"] = ending
    simulation.world.patch(JOB, NAMESPACE, "one", {"status": content})
    simulation.caches.wrote(JOB, simulation.world.get(JOB, NAMESPACE, "one"))
    assert await simulation.reconciler.reconcile(KEY) == Requeue(0.0)
    assert simulation.status("one").allocation is not None
    await simulation.reconciler.reconcile(KEY)
    (pod,) = simulation.pods("one")
    assert pod["metadata"]["uid"] == uid and pod["metadata"]["deletionTimestamp"]
