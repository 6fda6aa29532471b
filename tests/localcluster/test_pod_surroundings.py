"""What a process of a pod finds around itself: environment, files, credentials, GPUs."""

import json
import subprocess

import pytest

from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = pytest.mark.api


def printed_environment(pods, name, **more):
    more.setdefault("container", {})
    pods.run(name, "", **{**more, "container": {**more["container"], "command": ["env"]}})
    return dict(line.split("=", 1) for line in pods.logs(name).splitlines() if "=" in line)


def apply_sources(pods, config, secret):
    """The ConfigMap c and the Secret s."""
    pods.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": config},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": secret},
    )


def test_environment_comes_from_values_fields_config_maps_and_secrets(pods):
    """env and envFrom in order, $(NAME) expanded, fields of the pod, keys that are optional left out."""
    apply_sources(pods, {"color": "red", "ALL": "1"}, {"password": "pw"})

    def field(path):
        return {"fieldRef": {"fieldPath": path}}

    env = [
        {"name": "PLAIN", "value": "x-$(ALL)-$(NONE)-$$(ALL)"},
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "color"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}},
        {"name": "MISSING", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "no", "optional": True}}},
        {"name": "NAME", "valueFrom": field("metadata.name")},
        {"name": "NAMESPACE", "valueFrom": field("metadata.namespace")},
        {"name": "UID", "valueFrom": field("metadata.uid")},
        {"name": "TEAM", "valueFrom": field("metadata.labels['team']")},
        {"name": "NOTE", "valueFrom": field("metadata.annotations['note']")},
        {"name": "IP", "valueFrom": field("status.podIP")},
        {"name": "NODE", "valueFrom": field("spec.nodeName")},
        {"name": "ACCOUNT", "valueFrom": field("spec.serviceAccountName")},
    ]
    found = printed_environment(
        pods,
        "a",
        metadata={"labels": {"team": "blue"}, "annotations": {"note": "hi"}},
        container={"env": env, "envFrom": [{"configMapRef": {"name": "c"}, "prefix": ""}]},
        nodeSelector={"size": "small"},
    )
    pod = pods.get("a")
    wanted = {
        "PLAIN": "x-1-$(NONE)-$(ALL)",
        "COLOR": "red",
        "ALL": "1",
        "PASSWORD": "pw",
        "NAME": "a",
        "NAMESPACE": pods.namespace,
        "UID": pod["metadata"]["uid"],
        "TEAM": "blue",
        "NOTE": "hi",
        "IP": pod["status"]["podIP"],
        "NODE": "plain",
        "ACCOUNT": "default",
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert "MISSING" not in found


def test_the_environment_is_clean(pods):
    """Nothing of the caller's environment reaches a pod but its search path."""
    found = printed_environment(pods, "a", nodeSelector={"size": "small"})
    expected = {"PATH", "HOME", "TMPDIR", "LANG", "HOSTNAME", "OMP_NUM_THREADS", "POD_IP", "KUBECONFIG"}
    expected |= {"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NVIDIA_VISIBLE_DEVICES"}
    expected |= {"TERMINATION_MESSAGE_PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}
    assert {name for name in found if not name.startswith("BALLAST_")} <= expected
    assert found["HOSTNAME"] == "a"
    assert found["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_the_trainer_is_on_the_search_path(pods):
    """The programs beside this Python are found first."""
    pods.run("a", "command -v ballast-train")
    assert pods.logs("a").strip().endswith("/ballast-train")


def test_emulated_speed_reaches_the_pod_and_only_where_it_is_emulated(pods):
    """The node's annotation becomes BALLAST_EMULATED_SLOWDOWN; a node without one says nothing."""
    fast = printed_environment(pods, "a", nodeSelector={"ballast.dev/pool": "fast"})
    assert json.loads(fast["BALLAST_EMULATED_SLOWDOWN"]) == {"default": 2.0, "transformer": 3.5}
    plain = printed_environment(pods, "b", nodeSelector={"ballast.dev/pool": "plain"})
    assert "BALLAST_EMULATED_SLOWDOWN" not in plain


def test_volumes_are_where_the_container_mounts_them(pods):
    """ConfigMap, Secret, emptyDir, hostPath, downwardAPI, sub-paths, chosen items; paths are translated."""
    apply_sources(pods, {"one": "1", "two": "2"}, {"key": "k"})
    script = (
        "cd /config && ls | xargs; cat /items/here/two; cat /secret/key; echo w > /scratch/file;"
        "cat /scratch/file; cat /sub/one; cat $FILE; cat /fields/labels; ls -d '/host';"
        "ls /scratch | xargs"
    )
    pods.run(
        "a",
        script,
        metadata={"labels": {"team": "blue"}},
        container={
            "env": [{"name": "FILE", "value": "/config/one"}, {"name": "RUN", "value": "run-7"}],
            "volumeMounts": [
                {"name": "config", "mountPath": "/config"},
                {"name": "items", "mountPath": "/items"},
                {"name": "secret", "mountPath": "/secret"},
                {"name": "scratch", "mountPath": "/scratch"},
                {"name": "config", "mountPath": "/sub/one", "subPath": "one"},
                {"name": "scratch", "mountPath": "/own", "subPathExpr": "$(RUN)"},
                {"name": "fields", "mountPath": "/fields"},
                {"name": "host", "mountPath": "/host"},
            ],
        },
        volumes=[
            {"name": "config", "configMap": {"name": "c"}},
            {"name": "items", "configMap": {"name": "c", "items": [{"key": "two", "path": "here/two"}]}},
            {"name": "secret", "secret": {"secretName": "s"}},
            {"name": "scratch", "emptyDir": {}},
            {
                "name": "fields",
                "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]},
            },
            {"name": "host", "hostPath": {"path": "/usr", "type": "Directory"}},
        ],
    )
    assert pods.logs("a").splitlines() == ["one two", "2kw", '11team="blue"/usr', "file run-7"]


def test_a_missing_config_map_is_waited_for(pods):
    """The container waits, says why, and starts when the ConfigMap comes."""
    env = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "late", "key": "x"}}}]
    pods.create("a", "echo got $X", container={"env": env})
    pods.wait_for_waiting("a", 'configmap "late" not found')
    pods.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}, "data": {"x": "it"}})
    pods.wait_for_phase("a", "Succeeded")
    assert pods.logs("a") == "got it\n"


def test_a_pod_acts_as_its_own_service_account_and_may_only_what_that_may(pods):
    """The pod's KUBECONFIG is its service account's; its role's names are all it may read."""
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    rule = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine"], "verbs": ["get"]}
    pods.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "worker"}},
        {**rbac, "kind": "Role", "metadata": {"name": "r"}, "rules": [rule]},
        {
            **rbac,
            "kind": "RoleBinding",
            "metadata": {"name": "r"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"},
            "subjects": [{"kind": "ServiceAccount", "name": "worker"}],
        },
        *(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"k": name}}
            for name in ("mine", "other")
        ),
    )
    # The authorizer learns of a role by a watch.
    asks = ("auth", "can-i", "get", "configmap/mine", f"--as=system:serviceaccount:{pods.namespace}:worker")
    eventually(lambda: pods.kubectl(*asks, check=False).strip() == "yes", "the role to be in force")
    kubectl = pods.cluster.kubectl
    pods.create(
        "a",
        f"{kubectl} auth whoami -o jsonpath='{{.status.userInfo.username}}'; echo;"
        f"{kubectl} get configmap mine -o jsonpath='{{.data.k}}'; echo; {kubectl} get configmap other; true",
        serviceAccountName="worker",
    )
    pods.wait_for_phase("a", "Succeeded")
    who, mine, other = pods.logs("a").splitlines()
    assert (who, mine) == (f"system:serviceaccount:{pods.namespace}:worker", "mine")
    assert "forbidden" in other


def test_a_pod_without_a_token_gets_no_credentials(pods):
    """automountServiceAccountToken: false leaves KUBECONFIG out."""
    assert "KUBECONFIG" not in printed_environment(pods, "a", automountServiceAccountToken=False)


def test_the_python_client_finds_the_pods_credentials(pods):
    """kubernetes.config.load_config() in a pod works as in any other."""
    script = (
        "from kubernetes import client, config; config.load_config();"
        "print(client.AuthenticationV1Api().create_self_subject_review({}).status.user_info.username)"
    )
    ended = pods.run("a", "", container={"command": ["python", "-c", script]})
    assert ended["exitCode"] == 0, pods.logs("a")
    assert pods.logs("a").strip() == f"system:serviceaccount:{pods.namespace}:default"


def gpu(number):
    return {"resources": {"limits": {"nvidia.com/gpu": str(number)}}}


def test_kube_scheduler_hands_out_no_more_gpus_than_a_node_has(pods):
    """A third GPU on a node of two waits; it comes when one is free. Devices of a node are told apart."""
    node = {"nodeSelector": {"ballast.dev/pool": "fast"}}
    for name in ("a", "b"):
        pods.create(name, "echo $NVIDIA_VISIBLE_DEVICES; exec sleep 1000", container=gpu(1), **node)
        pods.wait_for_phase(name, "Running")
        pods.wait_for_log(name, "\n")
    assert {pods.logs(name).strip() for name in ("a", "b")} == {"0", "1"}
    pods.create("c", "echo $NVIDIA_VISIBLE_DEVICES; exec sleep 1000", container=gpu(1), **node)

    def refused():
        conditions = pods.status("c").get("conditions", [])
        return any(
            c.get("reason") == "Unschedulable" and "nvidia.com/gpu" in c["message"] for c in conditions
        )

    eventually(refused, "the scheduler to say that no GPU is free")
    freed = pods.logs("a").strip()
    pods.kubectl("delete", "pod", "a", "--grace-period=1")
    pods.wait_for_phase("c", "Running")
    pods.wait_for_log("c", "\n")
    assert pods.logs("c").strip() == freed


def test_a_pod_that_goes_around_the_scheduler_cannot_have_gpus_in_use(pods):
    """The node itself refuses, as kubelet does."""
    pods.create("a", "exec sleep 1000", container=gpu(2), nodeName="plain")
    pods.wait_for_phase("a", "Running")
    pods.create("b", "exec sleep 1000", container=gpu(1), nodeName="plain")
    status = pods.wait_for_phase("b", "Failed")
    assert status["reason"] == "OutOfnvidia.com/gpu"
    assert "0 of 2 free" in status["message"]


def test_pods_can_listen_on_the_same_port(pods):
    """Each binds its own address, so that ranks of many jobs share a machine."""
    serve = (
        "import os, socket; s = socket.create_server((os.environ['POD_IP'], 29400)); print('up', flush=True);"
        "s.accept()"
    )
    for name in ("a", "b"):
        pods.create(name, container={"command": ["python", "-c", serve]})
        pods.wait_for_phase(name, "Running")
        pods.wait_for_log(name, "up")
    for name in ("a", "b"):
        address = pods.status(name)["podIP"]
        subprocess.run(
            ["python3", "-c", f"import socket; socket.create_connection(('{address}', 29400))"],
            check=True,
            timeout=WAIT_SECONDS,
        )
        pods.wait_for_phase(name, "Succeeded")
