"""The chart's webhook for what the CRD's schema cannot say: kopf's validation, on a real API server."""

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kopf
import pytest
from ballast_localcluster.certificates import Identity, write_certificates
from ballast_operator import validation
from ballast_operator.views.spec import read_spec
from kubernetes import client

from tests.operator.api.objects import JOB, changed
from tests.operator.chart.conftest import JOBS
from tests.operator.chart.test_chart import of_kind, render
from tests.operator.loops.elastic.test_planned_degrees import PLANNED
from tests.support.control_plane import ControlPlane
from tests.support.ports import free_port
from tests.support.waiting import WAIT_SECONDS, eventually

HOOK = "ValidatingWebhookConfiguration"


@pytest.mark.api
def test_what_only_the_operator_can_tell_is_refused_at_once_where_it_is_switched_on(
    chart: Any, control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """In the words of the job's condition; a job that was there before may get labels, and leave."""
    assert not of_kind(render(chart), HOOK)
    port = free_port()
    write_certificates(tmp_path, (Identity(file="tls", common_name="hook", hosts=("127.0.0.1",)),))
    bundle = base64.b64encode((tmp_path / "ca.crt").read_bytes()).decode()
    values = {"validation": {"enabled": True, "port": port, "caBundle": bundle}, "watchNamespace": namespace}
    items = render(chart, values, name=namespace)
    pod = of_kind(items, "Deployment")[0]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["secret"]["optional"], "the operator starts without it"
    _, container = pod["containers"]
    (hook,) = of_kind(items, HOOK)
    reached = hook["webhooks"][0]["clientConfig"]
    reached["url"] = f"https://127.0.0.1:{port}{reached.pop('service')['path']}"
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    given |= {"KUBECONFIG": str(control_plane.kubeconfig), "BALLAST_VALIDATION_CERTIFICATE": str(tmp_path)}
    job = changed(JOB, "metadata.namespace", namespace)
    planner: Any = PLANNED["planner"]
    planner = {**planner, "gpus": [{"gpuType": "fast", "memory": "9M"}]}
    asked = {name: value for name, value in job["spec"].items() if name not in ("gpuTypes", "throughput")}
    wrong = {**job, "spec": {**asked, "planner": planner}}
    _, words = read_spec({**wrong, "metadata": {**wrong["metadata"], "uid": "1"}})
    assert words
    with control_plane.client() as api:
        jobs, where = client.CustomObjectsApi(api), (*JOBS, namespace, "trainingjobs")
        hooks = client.AdmissionregistrationV1Api(api)

        def refusal(body: Any, **options: Any) -> str:
            try:
                jobs.create_namespaced_custom_object(*where, body, **options)
            except client.ApiException as error:
                return str(error.body)
            return ""

        assert refusal(changed(wrong, "metadata.name", "before")) == ""
        process = subprocess.Popen([sys.executable, *container["command"][1:]], env={**os.environ, **given})
        hooks.create_validating_webhook_configuration(hook)
        try:
            eventually(lambda: refusal(wrong, dry_run="All"), "the webhook to be asked")
            assert words in refusal(wrong, dry_run="All")
            assert refusal(job) == ""
            jobs.patch_namespaced_custom_object(*where, "before", {"metadata": {"labels": {"a": "b"}}})
            jobs.delete_namespaced_custom_object(*where, "before")
        finally:
            hooks.delete_validating_webhook_configuration(hook["metadata"]["name"])
            process.terminate()
            assert process.wait(WAIT_SECONDS) == 0


def test_neither_an_error_nor_what_was_wrong_before_refuses_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that cannot be used may be suspended, and what this program cannot read is taken."""
    wrong = changed(JOB, "spec.pipeline.minStages", 1000)
    for old in (None, JOB):
        with pytest.raises(kopf.AdmissionError, match="minStages"):
            validation.usable(wrong, old=old)
    validation.usable(changed(wrong, "spec.suspend", True), old=wrong)
    validation.usable(JOB, old=wrong)
    with pytest.raises(kopf.AdmissionError, match="priority"):
        validation.usable(changed(wrong, "spec.priority", "high"), old=wrong)

    def fails(item: Any) -> Any:
        raise ValueError(item)

    monkeypatch.setattr(validation, "read_spec", fails)
    validation.usable(wrong, old=None)
