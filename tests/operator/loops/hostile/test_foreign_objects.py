"""A job's name chooses which objects it needs, and never whose objects it takes."""

from typing import Any

import pytest
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, POD, ROLE, ROLE_BINDING, SERVICE_ACCOUNT, Kind

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.examples import first_daily

SECRETS = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["*"]}]
STRANGER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "w", "controller": True}

IN_THE_WAY: dict[str, tuple[Kind, str, dict[str, Any]]] = {
    "a service account with rights": (SERVICE_ACCOUNT, "one-trainer", {}),
    "a role": (ROLE, "one-trainer", {"rules": SECRETS}),
    "a binding": (ROLE_BINDING, "one-trainer", {"roleRef": {"kind": "Role", "name": "all"}, "subjects": []}),
    "a lease": (LEASE, "one", {"spec": {"holderIdentity": "somebody-else"}}),
    "a pod": (POD, "one-1-0", {"spec": {"containers": [{"name": "web"}]}, "status": {"phase": "Running"}}),
    "a config map": (CONFIG_MAP, "one-plan", {"data": {"key": "value"}}),
}


def foreign(kind: Kind, name: str, content: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"namespace": NAMESPACE, "name": name, **metadata},
        **content,
    }


OWNERS = {
    "nobody": {},
    "a controller": {"ownerReferences": [STRANGER]},
    "a job of the same name that is gone": {
        "ownerReferences": [{"kind": "TrainingJob", "name": "one", "uid": "earlier", "controller": True}]
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("owner", first_daily(OWNERS.values()), ids=OWNERS.keys())
@pytest.mark.parametrize(("kind", "name", "content"), IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
async def test_an_object_of_somebody_else_is_left_alone_and_named(kind, name, content, owner):
    """The job gives its GPUs back and says what is in the way; once that is gone, it runs."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    before = simulation.world.put(kind, foreign(kind, name, content, **owner))
    simulation.add_job("one")
    await simulation.until(lambda: bool(simulation.status("one").restarts), ticks=30)
    await simulation.until(lambda: simulation.status("one").allocation is None, ticks=30)
    await simulation.tick()
    await simulation.refused("one", "NameTaken", f"{kind.kind} {name} is not the job's")
    assert simulation.world.get(kind, NAMESPACE, name) == before
    assert [line for line in simulation.world.log if line.startswith("create Event one")]
    # Another job uses the GPUs meanwhile.
    simulation.add_job("two", totalSteps=20)
    await simulation.until(lambda: simulation.state("two") == "Succeeded", ticks=60)
    assert simulation.world.get(kind, NAMESPACE, name) == before
    simulation.world.drop(kind, NAMESPACE, name)
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=700)
    status = simulation.status("one")
    assert set(status.restarts) == {"NameTaken"}
    assert not status.is_true("Failed")


async def test_all_that_is_in_the_way_is_named_at_once():
    """As of a job that was deleted with ``--cascade=orphan``: each would cost a wait otherwise."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    for kind, name, content in IN_THE_WAY.values():
        simulation.world.put(kind, foreign(kind, name, content))
    simulation.add_job("one")
    await simulation.until(lambda: bool(simulation.status("one").restarts), ticks=30)
    await simulation.until(lambda: "The same" in simulation.condition("one", "Admitted").message, ticks=60)
    message = simulation.condition("one", "Admitted").message
    assert all(f"{kind.kind} {name}" in message for kind, name, _ in IN_THE_WAY.values() if kind is not POD)


async def test_a_job_that_goes_takes_nothing_of_others_with_it():
    """The garbage collector deletes what the job controls: not the account that was there before."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    account = simulation.world.put(SERVICE_ACCOUNT, foreign(SERVICE_ACCOUNT, "one-trainer", {}))
    simulation.add_job("one")
    await simulation.until(lambda: bool(simulation.status("one").restarts), ticks=30)
    simulation.world.drop(JOB, NAMESPACE, "one")
    await simulation.ticks(5)
    assert simulation.world.get(SERVICE_ACCOUNT, NAMESPACE, "one-trainer") == account


async def test_a_role_that_somebody_has_widened_is_set_back_at_the_next_launch():
    """The job's own role grants what it should, and no more."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one")
    rules = simulation.world.get(ROLE, NAMESPACE, "one-trainer")["rules"]
    simulation.world.patch(ROLE, NAMESPACE, "one-trainer", {"rules": SECRETS})
    simulation.world.drop(POD, NAMESPACE, "one-1-0")
    await simulation.until(
        lambda: simulation.status("one").launches == 2 and simulation.state("one") == "Running"
    )
    assert simulation.world.get(ROLE, NAMESPACE, "one-trainer")["rules"] == rules


@pytest.mark.parametrize("kind", [SERVICE_ACCOUNT, ROLE, ROLE_BINDING])
async def test_rights_that_somebody_deletes_are_put_back_when_the_trainer_falls_silent(kind):
    """Without them it cannot renew its Lease; the gang is not restarted for it."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one")
    simulation.world.drop(kind, NAMESPACE, "one-trainer")
    simulation.trainers["one"].silent = True
    await simulation.until(lambda: simulation.world.get(kind, NAMESPACE, "one-trainer") is not None, ticks=60)
    simulation.trainers["one"].silent = False
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").launches == 1


@pytest.mark.parametrize(
    "labels",
    [
        {"ballast.dev/job": "two"},
        {"ballast.dev/job": None},
        {"ballast.dev/rank": "1"},
        {"ballast.dev/rank": "x"},
    ],
    ids=str,
)
async def test_labels_that_somebody_edits_take_no_pod_out_of_its_gang(labels):
    """The gang trains on in its first launch, and no GPU is given twice."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    await simulation.run_job("one")
    pod = simulation.pods("one")[0]["metadata"]["name"]
    simulation.world.patch(POD, NAMESPACE, pod, {"metadata": {"labels": labels}})
    await simulation.tick()
    await simulation.tick()
    assert simulation.state("one") == "Running"
    assert simulation.status("one").launches == 1
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").restarts == {}
