"""The rights of a job's pods."""

from ballast_operator.desired.owned import access_objects
from ballast_operator.desired.pod import pod_object
from ballast_policies.contract import lease_name, plan_config_map_name

from tests.operator.steps.contexts import PODS, a_running_view
from tests.operator.views.builders import a_spec


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
