"""A real API server takes the examples and refuses what is malformed, by the CRDs alone."""

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.contract.refusals import RULES
from tests.operator.api.malformed import JOBS, POLICIES
from tests.operator.api.objects import JOB, POLICY, REMOVED, RESHAPED, SCRIPT, Malformed, changed
from tests.support.control_plane import ControlPlane, fresh_namespace

pytestmark = pytest.mark.api

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted(
    path
    for folder in (".", "demo", "scripts", "karpenter")
    for path in FOLDER.glob(f"{folder}/*.yaml")
    # Others' kinds: tests/e2e/test_karpenter.py and test_real_kubelets.py create them.
    if path.name not in ("networkpolicy.yaml", "nodepool.yaml")
)
AS_KUBECTL = {"fieldValidation": "Strict", "dryRun": "All"}
"""Unknown fields are an error; nothing is kept."""

PLURALS = {"TrainingJob": "trainingjobs", "ClusterPolicy": "clusterpolicies"}


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> Iterator[client.ApiClient]:
    with control_plane.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def stored(control_plane: ControlPlane, api: client.ApiClient) -> Iterator[dict[str, Any]]:
    """A job of which each change is refused."""
    with fresh_namespace(control_plane) as namespace:
        yield send(api, "POST", changed(JOB, "metadata.namespace", namespace))


class RefusedError(Exception):
    """The API server said no."""


def send(api: client.ApiClient, method: str, item: dict[str, Any], **query: str) -> dict[str, Any]:
    """Create (POST) or replace (PUT) an object.

    Raises:
        RefusedError: with the API server's message.
    """
    plural = PLURALS[item["kind"]]
    path = f"/apis/ballast.dev/v1alpha1/{plural}"
    if item["kind"] == "TrainingJob":
        path = (
            f"/apis/ballast.dev/v1alpha1/namespaces/{item['metadata'].get('namespace', 'default')}/{plural}"
        )
    if method == "PUT":
        path += f"/{item['metadata']['name']}"
    status, result = call(api, method, f"{path}?{urllib.parse.urlencode(query)}", item)
    if status in (400, 422):
        raise RefusedError(result["message"])
    assert status in (200, 201), result
    return result


def call(
    api: client.ApiClient,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    accept: str = "application/json",
) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON of one request as administrator."""
    request = api.param_serialize(
        method=method,
        resource_path=path,
        path_params={},
        query_params=[],
        post_params=[],
        files={},
        header_params={"Content-Type": "application/json", "Accept": accept},
        body=body,
        auth_settings=["BearerToken"],
    )
    answer = api.call_api(*request)
    return answer.status, json.loads(answer.read())


def refusal(api: client.ApiClient, method: str, item: dict[str, Any]) -> str:
    """The message with which the API server refuses the object, asked as kubectl asks."""
    with pytest.raises(RefusedError) as caught:
        send(api, method, item, **AS_KUBECTL)
    return str(caught.value)


def check_refused(api: client.ApiClient, item: dict[str, Any], case: Malformed) -> None:
    message = refusal(api, "POST", item)
    assert names(message, case.field)
    assert case.words.lower() in message.lower()


def names(message: str, field: str) -> bool:
    """True if the message is about the field: by its path, or in the words of several rules about a spec."""
    return field in message or (
        "spec: Invalid value" in message and f" {field.removeprefix('spec.')}: " in message
    )


@pytest.mark.parametrize("case", JOBS, ids=lambda case: case.scenario)
def test_the_api_server_refuses_a_malformed_training_job(api: client.ApiClient, case: Malformed) -> None:
    """The message names field and reason."""
    check_refused(api, changed(JOB, case.path, case.value), case)


@pytest.mark.parametrize("case", POLICIES, ids=lambda case: case.scenario)
def test_the_api_server_refuses_a_malformed_cluster_policy(api: client.ApiClient, case: Malformed) -> None:
    """The message names field and reason."""
    check_refused(api, changed(POLICY, case.path, case.value), case)


@pytest.mark.parametrize(
    "item",
    [JOB, RESHAPED, SCRIPT, POLICY],
    ids=["TrainingJob", "TrainingJob that says how it reshapes", "script", "ClusterPolicy"],
)
def test_the_api_server_accepts_a_wellformed_object(api: client.ApiClient, item: dict[str, Any]) -> None:
    """So that the refusals above have one reason only."""
    send(api, "POST", item, **AS_KUBECTL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_api_server_accepts_an_example(api: client.ApiClient, path: Path) -> None:
    for item in yaml.safe_load_all(path.read_text()):
        send(api, "POST", item, **AS_KUBECTL)


def test_two_that_apply_the_network_policies_do_not_conflict(api: client.ApiClient) -> None:
    """As with kubectl first, by a GitOps controller later: a default inside a list makes two lists of it."""
    path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies?dryRun=All"
    for item in yaml.safe_load_all((FOLDER / "networkpolicy.yaml").read_text()):
        status, stored = call(api, "POST", path, item)
        assert status == 201, stored
        for rules in ("ingress", "egress"):
            assert stored["spec"].get(rules) == item["spec"].get(rules)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("spec.model.name", "recurrent", "model is immutable"),
        ("spec.model.args.width", 128, "model is immutable"),
        ("spec.pipeline.globalBatchSize", 32, "globalBatchSize is immutable"),
        ("spec.checkpoint.path", "/elsewhere", "path is immutable"),
        ("spec.model", REMOVED, "model is immutable"),
        ("spec.managedBy", "kueue.x-k8s.io/multikueue", "managedBy is immutable"),
    ],
)
def test_a_change_that_makes_no_sense(
    api: client.ApiClient, stored: dict[str, Any], path: str, value: Any, words: str
) -> None:
    """Is refused and says what to do instead."""
    message = refusal(api, "PUT", changed(stored, path, value))
    assert words in message
    assert "make a new TrainingJob" in message


@pytest.mark.parametrize(("change", "field", "words"), RULES)
def test_a_rule_of_the_configuration(
    api: client.ApiClient, change: dict[str, Any], field: str, words: str
) -> None:
    """What Python refuses, CEL refuses on apply, naming the same field."""
    spec = {
        **JOB["spec"],
        "totalSteps": 10,
        "model": {"name": "gpt"},
        "pipeline": {"maxStages": 2, "globalBatchSize": 16},
        "dynamics": [],
    }
    for key, value in change.items():
        spec[key] = {**spec[key], **value} if key == "pipeline" else value
    spec = {key: value for key, value in spec.items() if value is not None}
    assert names(refusal(api, "POST", changed(JOB, "spec", spec)), f"spec.{field}")


def test_a_field_that_breaks_two_rules(api: client.ApiClient) -> None:
    """Both are told, and so are others of the same field, of which the API server has one rule."""
    job = changed(JOB, "spec.repack.targetStages", 9)
    job = changed(job, "spec.parallelism", {"gpusPerPod": 5, "zeroStage": 1})
    message = refusal(api, "POST", job)
    assert "repack.targetStages is above pipeline.maxStages" in message
    assert "the ranks of repack.targetStages do not fill whole pods of gpusPerPod" in message
    assert "parallelism.zeroStage: zeroStage shares the optimizer's state" in message


def test_changes_that_make_sense(api: client.ApiClient, namespace: str) -> None:
    """Suspending, a new weight and training longer are accepted."""
    job = send(api, "POST", changed(JOB, "metadata.namespace", namespace))
    for path, value in (("spec.suspend", True), ("spec.weight", 2.5), ("spec.totalSteps", 2000)):
        job = send(api, "PUT", changed(job, path, value), fieldValidation="Strict")


def test_the_api_server_fills_in_the_defaults_of_the_models(api: client.ApiClient) -> None:
    """Of the objects that a job has, no others: they stay as they were left out."""
    from ballast_operator.api.read import read_training_job

    stated = changed(JOB, "spec.repack", {"enabled": True})
    job = send(api, "POST", stated, **AS_KUBECTL)
    given = read_training_job(stated)
    assert read_training_job(job).spec == given.spec
    assert job["spec"]["repack"] == given.spec.config.to_dict()["repack"]
    left_out = {"training", "rebalance", "parallelism", "metrics"} - stated["spec"].keys()
    assert left_out
    assert not left_out & job["spec"].keys()


def test_the_status_is_its_own_subresource(api: client.ApiClient) -> None:
    """A user who writes a status along with the spec changes nothing."""
    job = send(api, "POST", changed(JOB, "status.state", "Succeeded"), **AS_KUBECTL)
    assert "status" not in job


@pytest.mark.parametrize("status", [{"launches": 2**31}, {"allocation": {"launch": 2**31}}])
def test_a_launch_that_no_plan_can_name(
    api: client.ApiClient, stored: dict[str, Any], status: dict[str, Any]
) -> None:
    """Its pods would be made and taken back without end."""
    meta = stored["metadata"]
    of_job = ("ballast.dev", "v1alpha1", meta["namespace"], "trainingjobs", meta["name"])
    with pytest.raises(client.ApiException, match="should be less than or equal to 2147483647"):
        client.CustomObjectsApi(api).patch_namespaced_custom_object_status(*of_job, {"status": status})


def test_kubectl_prints_each_column_from_its_field(api: client.ApiClient, namespace: str) -> None:
    """kubectl shows state, GPU type, GPUs, step, progress and age, each from its field."""
    job = send(api, "POST", changed(JOB, "metadata.namespace", namespace))
    custom = client.CustomObjectsApi(api)
    custom.patch_namespaced_custom_object_status(
        "ballast.dev",
        "v1alpha1",
        namespace,
        "trainingjobs",
        job["metadata"]["name"],
        {
            "status": {
                "state": "Running",
                "allocation": {
                    "gpuType": "v100",
                    "allGpuTypes": "v100",
                    "pool": "fast",
                    "gpus": 4,
                    "since": "2026-01-01T00:00:00Z",
                },
                "progress": {"step": 420, "percent": 42},
            }
        },
    )
    _, table = call(
        api,
        "GET",
        f"/apis/ballast.dev/v1alpha1/namespaces/{namespace}/trainingjobs",
        accept="application/json;as=Table;g=meta.k8s.io;v=v1",
    )
    shown = [column["name"] for column in table["columnDefinitions"] if column["priority"] == 0]
    assert shown == ["Name", "State", "GPU type", "GPUs", "Step", "Progress%", "Age"]
    row = dict(zip([c["name"] for c in table["columnDefinitions"]], table["rows"][0]["cells"], strict=True))
    assert (row["State"], row["GPU type"], row["GPUs"]) == ("Running", "v100", 4)
    assert (row["Step"], row["Progress%"]) == (420, 42)
