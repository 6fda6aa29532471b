"""``ballast doctor`` and ``ballast support-bundle`` on a real API server: what is wrong is found and told."""

import datetime
import json
import re
import sys
import tarfile
from types import SimpleNamespace

import pytest
import yaml
from ballast.client import training_job
from ballast_operator.cli.live.bundle import _logs, without_secrets
from ballast_operator.cli.live.doctor import CHECKS
from ballast_operator.cli.main import main
from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION
from ballast_policies.contract.messages import plan_config_map_name
from click.testing import CliRunner
from kubernetes import client

from tests.docs.blocks import ROOT
from tests.operator.live.conftest import JOBS, cluster_policy
from tests.support.access import binding
from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]
SECRET = "hunter2-is-not-to-be-seen"


def call(cluster, *words):
    return CliRunner().invoke(main, [words[0], "--kubeconfig", str(cluster.kubeconfig), *words[1:]])


def doctor(cluster, *words):
    done = call(cluster, "doctor", "--output", "json", *words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    found = json.loads(done.stdout)
    assert done.exit_code == any(one["status"] == "failed" for one in found)
    return {one["check"]: one for one in reversed(found)}  # of several, the first: other operators come last


def test_a_cluster_is_examined_with_and_without_an_operator(live_cluster, stage):
    """Each line says what was found; what is wrong says what to do, and the exit code is 1."""
    away = doctor(live_cluster, "-n", stage.namespace)
    assert away["operator"]["status"] == "failed" and "no operator has led" in away["operator"]["message"]
    assert away["operator's rights"]["status"] == "failed"  # no such account
    for check in ("kubernetes", "definitions", "your rights", "clock"):
        assert away[check]["status"] == "ok", away[check]
    assert doctor(live_cluster)["operator's rights"]["status"] == "ok"
    with stage.operator():
        checks = ("operator", "policy", "nodes")

        def well():
            found = doctor(live_cluster, "-n", stage.namespace)
            assert {found[check]["status"] for check in checks} == {"ok"}, found
            return True

        eventually(well, "an operator that leads")
        with stage.nursery.operator("default"):

            def two():
                lines = call(live_cluster, "doctor", "-n", stage.namespace).stdout.splitlines()
                told = [line for line in lines if "two give the same GPUs away" in line]
                return told and told[0].startswith(
                    "warning  operator: an operator leads in namespace default"
                )

            eventually(two, "the other operator to lead, and to be told of")
        job = training_job("stored", image="i", command=[sys.executable, "-c", ""], steps=1, volume="nowhere")
        stage.custom.create_namespaced_custom_object(namespace=stage.namespace, body=job, **JOBS)
        storage = doctor(live_cluster, "-n", stage.namespace)["storage"]
        assert storage["status"] == "failed" and f"{stage.namespace}/nowhere" in storage["message"]
    text = call(live_cluster, "doctor").stdout
    assert all(re.match(r"(ok|warning|failed|skipped) +[a-z]", line) for line in text.splitlines())


def test_the_rights_that_are_looked_at_are_those_of_the_charts_account(live_cluster, stage):
    """Whose name is the release's."""
    from tests.operator.chart.test_chart import CHART, helm, render

    with helm.Chart.load(CHART) as chart:
        rendered = render(chart, {"replicas": 0}, namespace=stage.namespace)
    (deployment,) = [one for one in rendered if one["kind"] == "Deployment"]
    client.AppsV1Api(stage.core.api_client).create_namespaced_deployment(stage.namespace, deployment)
    told = doctor(live_cluster, "-n", stage.namespace)["operator's rights"]
    assert told["status"] == "failed" and told["message"].startswith("ballast may not ")
    rights = client.RbacAuthorizationV1Api(stage.core.api_client)
    rights.create_cluster_role_binding(binding("ballast-operator", stage.namespace, "ballast"))
    try:
        eventually(
            lambda: (
                doctor(live_cluster, "-n", stage.namespace)["operator's rights"]["message"]
                == "ballast may do all that it needs"
            ),
            "the rights",
        )
    finally:
        rights.delete_cluster_role_binding(f"ballast-{stage.namespace}")


def test_what_an_account_may_not_look_at_is_said_to_be_unknown(live_cluster):
    """Nothing is known to be wrong: the exit code alone would read as if nothing were."""
    kubeconfig = live_cluster.folder / "credentials" / "scheduler.kubeconfig"
    done = CliRunner().invoke(main, ["doctor", "--kubeconfig", str(kubeconfig)])
    skipped = re.findall("^skipped +([^:]+):", done.stdout, re.MULTILINE)
    assert skipped
    told = f"skipped {len(skipped)} of {len(CHECKS)} checks, where faults may be: {', '.join(skipped)}\n"
    assert done.stderr == told
    # The role ballast-editor alone has no right to logs.
    assert "you may not " in done.stdout and "To fix: have the ClusterRole edit, " in done.stdout
    assert call(live_cluster, "doctor").stderr == ""


def test_nodes_without_a_device_plugin_and_pools_without_nodes_are_named(live_cluster, stage):
    """A pool whose labels no node has, and one whose nodes offer no GPU of its name."""
    pools = [
        {"name": "none", "nodeSelector": {"no": "node"}, "gpuType": "x"},
        {
            "name": "bare",
            "nodeSelector": {"ballast.dev/pool": "fast"},
            "gpuType": "x",
            "gpuResource": "amd.com/gpu",
        },
    ]
    body = {**cluster_policy(), "metadata": {"name": "of-a-test"}, "spec": {"nodePools": pools}}
    where = {**JOBS, "plural": "clusterpolicies"}
    stage.custom.create_cluster_custom_object(body=body, **where)
    try:
        lines = call(live_cluster, "doctor").stdout
    finally:
        stage.custom.delete_cluster_custom_object(name="of-a-test", **where)
    assert "no node is in pool none: none has the labels no=node. To fix: " in lines
    assert "nodes of pool bare offer no amd.com/gpu: fast-0. To fix: see whether the device plugin" in lines


def test_network_policies_that_keep_ranks_apart_are_named(live_cluster, stage):
    """By job and direction, until one lets them through; a job of one pod has nobody to reach."""
    bodies = [
        training_job(name, image="i", command=["true"], steps=1, gpus=gpus)
        for name, gpus in (("gang", 2), ("alone", 1), ("copies", 1), ("pod", 1))
    ]
    for job, per_pod in zip(bodies[2:], (1, 2), strict=True):
        del job["spec"]["template"]["spec"]["containers"][0]["command"]
        job["spec"] |= {"model": {"name": "gpt"}, "checkpoint": {"path": "/checkpoints"}}
        job["spec"]["parallelism"] = {"data": 2, "gpusPerPod": per_pod}
        job["spec"]["pipeline"] |= {"globalBatchSize": 8, "microbatches": 4}
    for job in bodies:
        stage.custom.create_namespaced_custom_object(namespace=stage.namespace, body=job, **JOBS)
    assert doctor(live_cluster)["network"]["status"] == "ok"
    closed, opened = yaml.safe_load_all((ROOT / "examples" / "networkpolicy.yaml").read_text())
    rules = client.NetworkingV1Api(stage.core.api_client)
    rules.create_namespaced_network_policy(stage.namespace, closed)
    told = doctor(live_cluster)["network"]
    ways = (f"{stage.namespace}/{job} ({way})" for job in ("copies", "gang") for way in ("ingress", "egress"))
    apart = ", ".join(ways)
    assert (told["status"], told["message"]) == ("failed", f"NetworkPolicies keep ranks apart: {apart}")
    ingress = opened["spec"]["ingress"]
    opened["spec"]["ingress"] = [{**ingress[0], "ports": [{"port": 29500}]}, *ingress[1:]]
    rules.create_namespaced_network_policy(stage.namespace, opened)
    assert doctor(live_cluster)["network"]["message"].endswith(
        f"/copies (ingress), {stage.namespace}/gang (ingress)"
    )
    opened["spec"]["ingress"] = ingress
    rules.replace_namespaced_network_policy("ballast-trainers", stage.namespace, opened)
    assert doctor(live_cluster)["network"]["status"] == "ok"


def test_ranks_that_do_not_meet_are_told_by_the_time_of_their_plan(live_cluster, stage):
    """The condition is False since the job was submitted, and may have waited; of others' jobs nothing is."""
    now = datetime.datetime.now(datetime.UTC)
    hour = (now - datetime.timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    running = {"type": "Running", "status": "False", "reason": "RanksMeeting", "message": "m"}
    status = {"state": "Starting", "conditions": [{**running, "lastTransitionTime": hour}]}
    for name in ("gang", "theirs"):
        job = training_job(name, image="i", command=["true"], steps=1, gpus=2)
        if name == "theirs":
            job["spec"] |= {"managedBy": "kueue.x-k8s.io/multikueue"}
        stage.custom.create_namespaced_custom_object(namespace=stage.namespace, body=job, **JOBS)
        stage.custom.patch_namespaced_custom_object_status(
            namespace=stage.namespace, name=name, body={"status": status}, **JOBS
        )
        written = {"name": plan_config_map_name(name), "annotations": {PLAN_WRITTEN_ANNOTATION: hour}}
        stage.core.create_namespaced_config_map(stage.namespace, {"metadata": written})
    assert doctor(live_cluster)["network"]["message"].endswith(f" 120 s: {stage.namespace}/gang")
    again = {"metadata": {"annotations": {PLAN_WRITTEN_ANNOTATION: now.strftime("%Y-%m-%dT%H:%M:%SZ")}}}
    stage.core.patch_namespaced_config_map(plan_config_map_name("gang"), stage.namespace, again)
    assert doctor(live_cluster)["network"]["status"] == "ok"


def test_a_bundle_holds_what_is_asked_for_and_no_value_of_an_environment(live_cluster, stage, tmp_path):
    """Policies, jobs, events and the findings; neither Secrets nor values, nor what was applied last."""
    stage.core.create_namespaced_secret(
        stage.namespace, client.V1Secret(metadata={"name": "s"}, string_data={"password": SECRET})
    )
    job = training_job(
        "kept", image="i", command=["true"], steps=1, gpus=64, environment={"TOKEN": SECRET, "ÄÖ": "x"}
    )
    job["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": SECRET}
    stage.custom.create_namespaced_custom_object(namespace=stage.namespace, body=job, **JOBS)
    file = tmp_path / "b.tar.gz"
    done = call(live_cluster, "support-bundle", "-n", stage.namespace, "--file", str(file))
    assert done.exit_code == 0, done.output
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        parts = {name.partition("/")[2]: archive.extractfile(name).read() for name in archive.getnames()}
    assert {"doctor.json", "versions.json", "trainingjobs.json", "clusterpolicies.json"} <= set(parts)
    assert not [name for name, data in parts.items() if SECRET.encode() in data]
    kept = next(one for one in json.loads(parts["trainingjobs.json"]) if one["metadata"]["name"] == "kept")
    assert kept["spec"]["template"]["spec"]["containers"][0]["env"][0] == {
        "name": "TOKEN",
        "value": "(left out)",
    }
    done = call(live_cluster, "support-bundle", "--file", str(tmp_path / "none" / "b"))
    assert done.exit_code == 2 and "there is no folder" in done.stderr


async def test_the_end_of_a_long_log_is_in_the_bundle(monkeypatch):
    """What somebody looks for was written last."""
    monkeypatch.setattr("ballast_operator.cli.live.bundle.MOST_LOG", 19)
    written = [b"line %d" % number for number in range(200_000)]

    class Connection:
        async def items(self, path, query, **_):
            yield {"metadata": {"name": "pod"}, "spec": {"containers": [{"name": "operator"}]}}

        async def lines(self, path, query):
            text = b"\n".join(written[-int(query.get("tailLines", len(written))) :])
            for line in text[: int(query.get("limitBytes", len(text)))].splitlines():
                yield line

    found = await _logs(SimpleNamespace(connection=Connection()), "ballast-system")
    assert found["logs/pod-operator.log"] == b"199998\nline 199999\n"


def test_a_claim_that_is_not_there_is_named_while_its_job_needs_it(live_cluster, stage):
    """Whoever has done its steps needs none."""
    job = training_job("claims", image="i", command=["true"], steps=1, volume="gone")
    stage.custom.create_namespaced_custom_object(namespace=stage.namespace, body=job, **JOBS)
    told = doctor(live_cluster)["storage"]
    assert (told["status"], told["fix"]) == ("failed", "create it")
    assert f"claim {stage.namespace}/gone, which a job names, is not there" in told["message"]
    ended = {"type": "Succeeded", "status": "True", "reason": "Finished", "message": "m"}
    at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    body = {"status": {"state": "Succeeded", "conditions": [{**ended, "lastTransitionTime": at}]}}
    stage.custom.patch_namespaced_custom_object_status(
        namespace=stage.namespace, name="claims", body=body, **JOBS
    )
    assert doctor(live_cluster)["storage"]["status"] != "failed"


def test_headers_and_values_on_command_lines_are_left_out():
    """The names of options stay."""
    probe = {"httpGet": {"path": "/ok", "httpHeaders": [{"name": "Authorization", "value": SECRET}]}}
    words = ["sh", "-p" + SECRET, "--token", SECRET, f"--key={SECRET}", f"export K={SECRET}"]
    left = without_secrets({"command": words, "args": words, "livenessProbe": probe})
    assert SECRET not in json.dumps(left)
    assert left["args"] == [*("(left out)", "-p", "--token", "(left out)"), "--key=(left out)", "(left out)"]


def test_an_odd_environment_is_left_out_whole():
    """What is no list of variables stays; what is no variable goes."""
    odd = {"env": [SECRET, {"name": "a"}, {"name": "b", "value": SECRET}], "x": [{"env": {"y": 1}}]}
    assert without_secrets(odd) == {
        "env": ["(left out)", {"name": "a"}, {"name": "b", "value": "(left out)"}],
        "x": [{"env": {"y": 1}}],
    }
