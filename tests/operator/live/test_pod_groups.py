"""Gangs as Kubernetes' own, where the API server has them."""

import json

import pytest
from kubernetes import client

from tests.operator.live.conftest import HAS_POD_GROUPS, Stage
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.api,
    pytest.mark.skipif(
        not HAS_POD_GROUPS, reason="PodGroups are of Kubernetes 1.37: BALLAST_KUBERNETES=1.37"
    ),
]

GROUPS = {"group": "scheduling.k8s.io", "version": "v1beta1", "plural": "podgroups", "name": "gang"}


def test_a_gang_is_a_pod_group_that_shrinks_with_it_and_goes_with_the_job(stage: Stage) -> None:
    """Its pods name it, kube-scheduler has bound them as one, and its least count follows."""

    def least() -> int:
        try:
            found = stage.custom.get_namespaced_custom_object(namespace=stage.namespace, **GROUPS)
        except client.ApiException as error:
            if error.status == 404:
                return 0
            raise
        return found["spec"]["schedulingPolicy"]["gang"]["minCount"]

    def bound(name: str) -> str:
        """The pod's group, once the pod has a node."""
        answer = stage.core.read_namespaced_pod(name, stage.namespace, _preload_content=False)
        spec = json.loads(answer.data)["spec"]
        return spec.get("schedulingGroup", {}).get("podGroupName", "none") if "nodeName" in spec else ""

    with stage.operator():
        script = {"total": 1_000_000, "shrinkAt": 4, "keep": 1}
        stage.add_job("gang", script=script)
        eventually(lambda: least() == 1, "the PodGroup of two pods to follow the shrink")
        eventually(lambda: len(stage.status("gang")["allocation"]["pods"]) == 1, "one pod to be left")
        (name,) = stage.status("gang")["allocation"]["pods"]
        assert bound(name) == "gang"
        stage.delete("gang")
        eventually(lambda: least() == 0, "the PodGroup to go with its job")
