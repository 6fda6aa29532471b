"""Objects of a job beside its pods: labels and owner, rights, Lease, plan, and a script's environment."""

import datetime

import pytest
from ballast_operator.desired import (
    access_objects,
    lease_object,
    owned,
    plan_object,
    pod_object,
    rendezvous_object,
    script_environment,
)
from ballast_operator.kube.kinds import LEASE
from ballast_policies.contract import (
    CONFIG_KEY,
    JOB_LABEL,
    PLAN_KEY,
    RENDEZVOUS_PORT,
    Plan,
    lease_name,
    plan_config_map_name,
    rendezvous_config_map_name,
    rendezvous_key,
)
from ballast_policies.contract.job.job import JobConfig

from tests.operator.steps.contexts import NOW, PODS, a_running_view
from tests.operator.views.builders import a_config, a_plan, a_spec, a_view


def test_an_object_of_a_job_is_labelled_and_owned_by_it():
    """Deleted with the job by the garbage collector; found by the job's label."""
    item = owned(a_running_view(), LEASE, "job", spec={"holderIdentity": ""})
    metadata = item["metadata"]
    assert (item["apiVersion"], item["kind"], item["spec"]) == (
        "coordination.k8s.io/v1",
        "Lease",
        {"holderIdentity": ""},
    )
    assert (metadata["namespace"], metadata["name"], metadata["labels"][JOB_LABEL]) == ("team", "job", "job")
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("TrainingJob", "job", "uid-job")
    assert owner["controller"] is True


def objects():
    return {kind.kind: body for kind, body in access_objects(a_running_view())}


def test_pods_may_touch_their_own_plan_and_lease_only():
    """Every rule names one object of the job."""
    names = {name for rule in objects()["Role"]["rules"] for name in rule["resourceNames"]}
    assert names == {plan_config_map_name("job"), lease_name("job")}


def test_the_role_is_bound_to_the_account_of_the_pods():
    """All three have one name, in the job's namespace."""
    binding = objects()["RoleBinding"]
    name = objects()["ServiceAccount"]["metadata"]["name"]
    assert binding["roleRef"]["name"] == objects()["Role"]["metadata"]["name"] == name
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "team"}]


def test_pods_run_as_that_account():
    """`serviceAccountName` of every pod."""
    view = a_running_view()
    pod = pod_object(
        view, a_spec(), view.status.allocation, number=0, pod=PODS[0], gpu_resource="nvidia.com/gpu"
    )
    assert pod["spec"]["serviceAccountName"] == objects()["ServiceAccount"]["metadata"]["name"]


def test_the_lease_is_named_after_the_job_and_left_to_the_trainer():
    """Only how long it lasts, in whole seconds: applying it again takes nothing from the trainer."""
    item = lease_object(a_running_view(), 59.5)
    assert item["metadata"]["name"] == lease_name("job")
    assert item["spec"] == {"leaseDurationSeconds": 60} and "annotations" not in item["metadata"]


CONFIG = a_config()


def written(**changes):
    arguments = {"now": NOW, "resource_version": None, **changes}
    return plan_object(a_running_view(), a_spec(config=CONFIG), a_plan(PODS), **arguments)


def test_the_plan_and_the_configuration_stand_side_by_side():
    """Both read back as what was written."""
    data = written()["data"]
    assert Plan.from_json(data[PLAN_KEY]) == a_plan(PODS)
    assert JobConfig.from_json(data[CONFIG_KEY]) == CONFIG


def test_the_time_of_writing_is_an_annotation_with_microseconds():
    """The wait for the acknowledgement is measured from it."""
    item = written(now=NOW + datetime.timedelta(microseconds=5))
    assert item["metadata"]["annotations"] == {"ballast.dev/written": "2026-01-01T12:00:00.000005Z"}


def test_a_plan_replaces_only_the_version_it_was_decided_on():
    """Without a version the object must not exist yet."""
    assert written(resource_version="7")["metadata"]["resourceVersion"] == "7"
    assert "resourceVersion" not in written()["metadata"]


SCRIPTED = ("job-1-0", "job-1-1", "job-1-2")


def variables(pod, *, gpus_per_pod=1):
    """Variable -> value, or where it comes from."""
    view = a_view(pods=SCRIPTED, plan=None, spec=a_spec())
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
    view = a_view(pods=SCRIPTED, plan=None, spec=a_spec())
    written = rendezvous_object(view, view.status.allocation, "10.0.0.7")
    assert key == {"name": written["metadata"]["name"], "key": rendezvous_key(1)}
    assert written["data"] == {key["key"]: "10.0.0.7"}


def test_an_address_of_an_earlier_launch_is_not_used():
    """Each launch has a key of its own."""
    view = a_view(pods=SCRIPTED, plan=None, spec=a_spec())
    allocation = view.status.allocation.replace(launch=2)
    written = rendezvous_object(view, allocation, "10.0.0.8")
    assert written["metadata"]["name"] == rendezvous_config_map_name(view.name)
    assert rendezvous_key(1) not in written["data"]


def test_the_client_library_learns_how_long_saving_may_take():
    """In seconds."""
    found = variables(0)
    assert (found["BALLAST_SAVE_SECONDS"], found["BALLAST_TOTAL_STEPS"]) == ("12.5", "100")
