"""Who may do what, asked of a real API server; what is used: ``tests/operator/live``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ballast_client.api_server import ApiServer, ChannelError
from ballast_client.channels import Kubernetes
from ballast_operator.api.rbac import Rule, trainer_rules
from ballast_operator.desired import access_objects
from ballast_operator.local_operator import OPERATOR_NAME, apply_objects, install_objects
from ballast_operator.views.job import JobView
from ballast_policies.contract.messages import Report
from ballast_trainer.channel.base import Messages, OperatorChannel
from ballast_trainer.channel.kubernetes import WatchedObject
from kubernetes import client
from kubernetes.dynamic import DynamicClient

from tests.support.access import account, binding, kubeconfig_of, may, new_account, wait_for_operators_rights
from tests.support.control_plane import ControlPlane
from tests.support.waiting import eventually
from tests.trainer.channel.messages import REPORT

SYSTEM = "ballast-rbac-test"
OPERATOR = account(SYSTEM, OPERATOR_NAME)
BALLAST, COORDINATION, RBAC = "ballast.dev", "coordination.k8s.io", "rbac.authorization.k8s.io"


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> Iterator[client.ApiClient]:
    """The API server with everything installed that the operator needs."""
    with control_plane.client() as opened:
        apply_objects(DynamicClient(opened), install_objects(SYSTEM))
        wait_for_operators_rights(opened, SYSTEM)
        yield opened


def role(namespace: str, name: str, rules: list[Rule]) -> client.V1Role:
    return client.V1Role(
        metadata=client.V1ObjectMeta(name=name, namespace=namespace),
        rules=[
            client.V1PolicyRule(
                api_groups=rule["apiGroups"],
                resources=rule["resources"],
                verbs=rule["verbs"],
                resource_names=rule.get("resourceNames"),
            )
            for rule in rules
        ],
    )


def give_trainers_role(api: client.ApiClient, namespace: str) -> None:
    """The role of job a's pods, to their service account."""
    rbac = client.RbacAuthorizationV1Api(api)
    rbac.create_namespaced_role(namespace, role(namespace, "a-trainer", trainer_rules("a")))
    rbac.create_namespaced_role_binding(namespace, binding("a-trainer", namespace, "a-trainer", kind="Role"))


@pytest.fixture
def as_operator(control_plane: ControlPlane, api: client.ApiClient) -> Iterator[client.ApiClient]:
    """The API server as the operator's service account sees it."""
    with control_plane.client() as opened:
        opened.set_default_header("Impersonate-User", OPERATOR)
        opened.set_default_header("Impersonate-Group", "system:serviceaccounts")
        yield opened


@pytest.mark.api
@pytest.mark.parametrize(
    ("verb", "group", "resource"),
    [
        ("get", "", "secrets"),
        ("patch", BALLAST, "trainingjobs"),
        ("update", BALLAST, "trainingjobs/finalizers"),
        ("patch", "", "pods"),
        ("delete", "", "configmaps"),
        ("delete", COORDINATION, "leases"),
        ("create", BALLAST, "clusterpolicies"),
        ("patch", "", "nodes"),
        ("create", "", "pods/exec"),
        ("escalate", RBAC, "roles"),
        ("bind", RBAC, "roles"),
        ("create", RBAC, "clusterroles"),
    ],
)
def test_what_the_operator_has_no_business_with(
    api: client.ApiClient, verb: str, group: str, resource: str
) -> None:
    assert not may(api, OPERATOR, verb, group, resource)


@pytest.mark.api
def test_the_operator_gives_a_job_its_role_and_no_further_right(
    as_operator: client.ApiClient, namespace: str
) -> None:
    """It cannot grant more than it holds itself."""
    rbac = client.RbacAuthorizationV1Api(as_operator)
    rbac.create_namespaced_role(namespace, role(namespace, "a-trainer", trainer_rules("a")))
    greedy: Rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    with pytest.raises(client.ApiException, match="attempting to grant RBAC permissions not currently held"):
        rbac.create_namespaced_role(namespace, role(namespace, "b-trainer", [greedy]))


@pytest.mark.api
def test_a_pod_may_only_follow_its_plan_and_renew_its_lease(api: client.ApiClient, namespace: str) -> None:
    """No other job's, and nothing else."""
    give_trainers_role(api, namespace)
    user = account(namespace, "a-trainer")

    def allowed(verb: str, group: str, resource: str, name: str | None) -> bool:
        return may(api, user, verb, group, resource, namespace=namespace, name=name)

    eventually(lambda: allowed("get", "", "configmaps", "a-plan"), "the pod's permissions")
    assert allowed("watch", "", "configmaps", "a-plan")
    assert not allowed("watch", "", "configmaps", "b-plan")
    assert not allowed("watch", "", "configmaps", None)
    assert not allowed("list", "", "configmaps", "a-plan")
    assert not allowed("update", COORDINATION, "leases", "a")
    assert not allowed("get", COORDINATION, "leases", "a")
    assert allowed("patch", COORDINATION, "leases", "a")
    assert not allowed("patch", "", "configmaps", "a-plan")
    assert not allowed("get", "", "configmaps", "b-plan")
    assert not allowed("patch", COORDINATION, "leases", "b")
    assert not allowed("list", "", "configmaps", None)
    assert not allowed("create", COORDINATION, "leases", None)
    assert not allowed("get", BALLAST, "trainingjobs", "a")
    assert not allowed("list", "", "pods", None)


@pytest.mark.api
def test_a_trainer_follows_its_plan_with_these_rights(
    control_plane: ControlPlane, api: client.ApiClient, namespace: str, tmp_path: Path
) -> None:
    """By a watch of the one ConfigMap, as its own account; a report may be too long for the Lease."""
    core = client.CoreV1Api(api)
    give_trainers_role(api, namespace)
    token = new_account(api, namespace, "a-trainer")
    kubeconfig = kubeconfig_of(token, control_plane.kubeconfig, tmp_path / "kubeconfig")
    plan = client.V1ConfigMap(metadata=client.V1ObjectMeta(name="a-plan"), data={"number": "1"})
    core.create_namespaced_config_map(namespace, plan)
    server = ApiServer.from_environment({"KUBECONFIG": str(kubeconfig)})
    watched = WatchedObject(server, f"/api/v1/namespaces/{namespace}/configmaps", "a-plan")

    def reads(number: str) -> bool:
        try:
            found = watched.newest()
        except ChannelError:  # the Role is not in force everywhere at once
            return False
        return found is not None and found["data"]["number"] == number

    eventually(lambda: reads("1") and watched.live, "the watch")
    core.patch_namespaced_config_map("a-plan", namespace, {"data": {"number": "2"}})
    eventually(lambda: reads("2"), "the change")
    watched.close()
    leases = client.CoordinationV1Api(api)
    leases.create_namespaced_lease(namespace, client.V1Lease(metadata=client.V1ObjectMeta(name="a")))
    channel = OperatorChannel(Kubernetes(server, namespace=namespace, job="a", pod="a-1-0"))
    for layers in (10_000, 100_000):  # more than the annotations of an object may have, and than a request
        sizes = (10**15,) * layers
        report = REPORT.replace(step=layers, layer_bytes=sizes, layer_weight_bytes=sizes)
        channel.write(Messages(report=report))
        lease = leases.read_namespaced_lease("a", namespace)
        told = Report.from_json(lease.metadata.annotations["ballast.dev/report"])
        assert told == REPORT.replace(step=layers)
    server.close()


@pytest.mark.slow
def test_installed_objects_come_in_an_order_that_can_be_applied() -> None:
    kinds = [item["kind"] for item in install_objects("somewhere")]
    assert kinds[:2] == ["CustomResourceDefinition"] * 2
    assert kinds.index("Namespace") < kinds.index("ServiceAccount") < kinds.index("ClusterRoleBinding")
    bound = next(item for item in install_objects("somewhere") if item["kind"] == "ClusterRoleBinding")
    assert bound["subjects"][0]["namespace"] == "somewhere"


def test_the_role_that_the_operator_makes() -> None:
    """Holds the rules tested here, and those that the operator may give away."""
    view = JobView(key=("default", "a"), uid="1", generation=1, spec=None)
    (made,) = [body for kind, body in access_objects(view) if kind.kind == "Role"]
    assert made["rules"] == trainer_rules("a")
