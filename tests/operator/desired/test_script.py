"""The environment of a script's pods, and where the others find rank 0."""

import pytest
from ballast_operator.desired.owned import rendezvous_object, script_environment
from ballast_policies.contract import RENDEZVOUS_PORT, rendezvous_config_map_name, rendezvous_key

from tests.operator.views.builders import a_spec, a_view

PODS = ("job-1-0", "job-1-1", "job-1-2")


def variables(pod, *, gpus_per_pod=1):
    """Variable -> value, or where it comes from."""
    view = a_view(pods=PODS, plan=None, spec=a_spec())
    allocation = view.status.allocation.replace(gpus_per_pod=gpus_per_pod)
    listed = script_environment(view, a_spec(), allocation, pod=pod, save_seconds=12.5)
    assert len({each["name"] for each in listed}) == len(listed)
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in listed}


@pytest.mark.parametrize("pod", [0, 1, 2])
def test_a_pod_of_one_gpu_has_a_rank(pod):
    """As torchrun would set it, so that a plain script needs no launcher."""
    found = variables(pod)
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(pod), "0", "3")
    assert found["MASTER_PORT"] == str(RENDEZVOUS_PORT)


def test_a_pod_of_several_gpus_leaves_ranks_to_torchrun():
    """Its own options are there; a rank of the pod would be wrong for all but one process."""
    found = variables(1, gpus_per_pod=4)
    assert "RANK" not in found
    assert "LOCAL_RANK" not in found
    assert (found["PET_NNODES"], found["PET_NPROC_PER_NODE"], found["PET_NODE_RANK"]) == ("3", "4", "1")
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("12", "4")


def test_rank_0_knows_its_own_address_and_the_others_wait_for_it():
    """They refer to a key that is written when rank 0 has an address."""
    assert variables(0)["MASTER_ADDR"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    key = variables(2)["MASTER_ADDR"]["configMapKeyRef"]
    view = a_view(pods=PODS, plan=None, spec=a_spec())
    written = rendezvous_object(view, view.status.allocation, "10.0.0.7")
    assert key == {"name": written["metadata"]["name"], "key": rendezvous_key(1)}
    assert written["data"] == {key["key"]: "10.0.0.7"}


def test_an_address_of_an_earlier_launch_is_not_used():
    """Each launch has a key of its own."""
    view = a_view(pods=PODS, plan=None, spec=a_spec())
    allocation = view.status.allocation.replace(launch=2)
    written = rendezvous_object(view, allocation, "10.0.0.8")
    assert written["metadata"]["name"] == rendezvous_config_map_name(view.name)
    assert rendezvous_key(1) not in written["data"]


def test_the_client_library_learns_how_long_saving_may_take():
    """In seconds."""
    found = variables(0)
    assert (found["BALLAST_SAVE_SECONDS"], found["BALLAST_TOTAL_STEPS"]) == ("12.5", "100")
