"""What a real API server refuses, and objects of others in the way: named on the job, and waited for."""

from typing import Any

import pytest
from kubernetes import client

from tests.operator.live.conftest import Stage
from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]

DONE = {"total": 5}


def admitted(stage: Stage, name: str) -> dict[str, Any]:
    conditions = stage.status(name).get("conditions") or []
    return next((c for c in conditions if c["type"] == "Admitted"), {"reason": "", "message": ""})


def refusal_of_a_pod(stage: Stage) -> str:
    """Why no pod can be made; empty: it can. The API server learns of quotas by a watch."""
    body = {"metadata": {"name": "tried"}, "spec": {"containers": [{"name": "c", "image": "none"}]}}
    try:
        stage.core.create_namespaced_pod(stage.namespace, body, dry_run="All")
    except client.ApiException as error:
        return str(error.body)
    return ""


def test_what_keeps_pods_from_being_made_is_named_and_ends_with_its_cause(stage: Stage) -> None:
    """A quota, a service account of somebody else, and a template that no schema of ours finds wrong."""
    quota = client.V1ResourceQuota(
        metadata=client.V1ObjectMeta(name="none"), spec=client.V1ResourceQuotaSpec(hard={"pods": "0"})
    )
    stage.core.create_namespaced_resource_quota(stage.namespace, quota)
    eventually(lambda: "exceeded quota" in refusal_of_a_pod(stage), "the quota to be in force")
    account = stage.core.create_namespaced_service_account(
        stage.namespace, client.V1ServiceAccount(metadata=client.V1ObjectMeta(name="taken-trainer"))
    )
    with stage.operator():
        stage.add_job("waits", script=DONE, backoffLimit=0)
        eventually(lambda: admitted(stage, "waits")["reason"] == "NotAllowed", "the quota to be named")
        assert "exceeded quota: none" in admitted(stage, "waits")["message"]
        assert stage.status("waits").get("launches", 0) == 0
        stage.core.delete_namespaced_resource_quota("none", stage.namespace)
        wrong = {"spec": {"containers": [{"name": "trainer", "image": "x", "imagePullPolicy": "Sometimes"}]}}
        stage.add_job("wrong", script=DONE, template=wrong)
        eventually(
            lambda: admitted(stage, "wrong")["reason"] == "Misconfigured", "the template to be refused"
        )
        assert "imagePullPolicy" in admitted(stage, "wrong")["message"]
        stage.add_job("taken", script=DONE)
        eventually(lambda: admitted(stage, "taken")["reason"] == "NameTaken", "the account to be named")
        assert "ServiceAccount taken-trainer is not the job's" in admitted(stage, "taken")["message"]
        untouched = stage.core.read_namespaced_service_account("taken-trainer", stage.namespace)
        assert untouched.metadata.resource_version == account.metadata.resource_version
        stage.core.delete_namespaced_service_account("taken-trainer", stage.namespace)
        stage.wait_for("waits", "Succeeded")
        stage.wait_for("taken", "Succeeded")
        assert stage.status("wrong").get("launches", 0) == 0
