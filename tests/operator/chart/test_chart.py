"""The Helm chart: what it renders, what it refuses, and that a real API server takes it."""

import dataclasses
import io
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from ballast_operator.api.rbac import kueue_rules, operator_rules, page_rules, people_roles
from ballast_operator.api.schema.crd import custom_resource_definitions
from ballast_operator.settings import Settings
from ballast_policies.contract.messages import RANK_LABEL

from tests.support.control_plane import ControlPlane
from tests.support.waiting import WAIT_SECONDS

LIMIT = int(WAIT_SECONDS)

helm = pytest.importorskip("helm_python", reason="Helm as a library has no wheel for this machine")

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "ballast"
EVERYTHING: dict[str, Any] = {
    "replicas": 2,
    "watchNamespace": "research",
    "settings": {"JOB_BIND_SECONDS": 30, "SOLVER_LIMIT_SECONDS": 2.5},
    "imagePullSecrets": [{"name": "registry"}],
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
    "podAnnotations": {"team": "platform"},
    "podLabels": {"team": "platform"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "system-cluster-critical",
    "revisionHistoryLimit": 3,
    "hostNetwork": True,
    "serviceAccount": {"annotations": {"a": "b"}},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Ballast"}},
    },
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {}}],
        "uiFrom": [{"podSelector": {}}],
    },
    "ui": {"enabled": True, "port": 8091, "url": "https://ballast.example.com"},
    "kueue": {"enabled": True},
    "podDisruptionBudget": {"enabled": True},
    "validation": {"enabled": True, "annotations": {"cert-manager.io/inject-ca-from": "a/b"}},
    "admissionPolicies": {"enabled": True, "namespaceSelector": {"matchLabels": {"ballast": "yes"}}},
}
"""Everything that can be switched on."""

FASTER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Seven times, with the definitions of hundreds of kilobytes."""


def render(
    chart: Any,
    values: dict[str, Any] | None = None,
    name: str = "ballast",
    namespace: str = "ballast-system",
) -> list[dict[str, Any]]:
    """All objects that the values make."""
    files = chart.render(values or {}, name=name, namespace=namespace)
    return [
        item
        for path, text in files.items()
        if not path.endswith("NOTES.txt")
        for item in yaml.load_all(text, Loader=FASTER)
        if item
    ]


def of_kind(items: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in items if item["kind"] == kind]


@pytest.mark.slow
def test_the_default_objects_are_what_an_operator_needs(chart: Any) -> None:
    """And nothing that a cluster may lack."""
    kinds = sorted(item["kind"] for item in render(chart))
    assert kinds == sorted(
        [
            "ClusterRole",
            "ClusterRole",
            "ClusterRole",
            "ClusterRoleBinding",
            "CustomResourceDefinition",
            "CustomResourceDefinition",
            "Deployment",
            "Pod",
            "Service",
            "ServiceAccount",
        ]
    )


def test_a_switch_of_the_pod_that_is_set_to_null_is_off(chart: Any) -> None:
    """As an older release's values file may have it, or `--set hostNetwork=null`."""
    (deployment,) = of_kind(render(chart, {"hostNetwork": None}), "Deployment")
    assert not {"hostNetwork", "dnsPolicy"} & deployment["spec"]["template"]["spec"].keys()


def test_the_chart_is_clean() -> None:
    """Helm's own lint finds nothing but the missing icon."""
    report = helm.lint(str(CHART), strict=True)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_every_pod_runs_without_privileges(chart: Any, kind: str) -> None:
    """No root, no writable root file system, no unbounded memory."""
    (item,) = of_kind(render(chart), kind)
    spec = item["spec"]["template"]["spec"] if kind == "Deployment" else item["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


@pytest.mark.slow
def test_arguments_and_settings_reach_the_operator(chart: Any) -> None:
    """As options of the command and variables that it reads; the pod knows its namespace for the Lease."""
    from ballast_operator.cli.operator import operator
    from ballast_operator.settings import from_environment

    (deployment,) = of_kind(render(chart, EVERYTHING), "Deployment")
    container, _ = deployment["spec"]["template"]["spec"]["containers"]
    command, *options = container["args"]
    assert command == operator.name
    context = operator.make_context("operator", list(options))
    assert (context.params["namespace"], context.params["health_port"]) == ("research", 8080)
    assert context.params["page_port"] == 8091
    environment = {variable["name"]: variable for variable in container["env"]}
    assert environment["BALLAST_NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    stated = {n: v["value"] for n, v in environment.items() if n.startswith("BALLAST_") and "value" in v}
    assert container["volumeMounts"][-1:] == EVERYTHING["extraVolumeMounts"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["volumes"][-1:] == EVERYTHING["extraVolumes"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert deployment["spec"]["revisionHistoryLimit"] == 3
    settings = from_environment(stated)
    assert (settings.job.bind_seconds, settings.solver.limit_seconds) == (30, 2.5)


@pytest.mark.slow
def test_the_crds_are_the_generated_ones_and_stay_after_uninstall(chart: Any) -> None:
    """Unless the values say otherwise."""
    rendered = of_kind(render(chart), "CustomResourceDefinition")
    for crd in rendered:
        assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    by_name = {crd["metadata"]["name"]: crd for crd in rendered}
    assert by_name == {crd["metadata"]["name"]: crd for crd in custom_resource_definitions()}
    bare = of_kind(render(chart, {"crds": {"keep": False}}), "CustomResourceDefinition")
    assert all("annotations" not in crd["metadata"] for crd in bare)
    assert of_kind(render(chart, {"crds": {"install": False}}), "CustomResourceDefinition") == []


@pytest.mark.slow
def test_the_permissions_are_those_of_the_one_source(chart: Any) -> None:
    """Under the release's name."""
    roles = {item["metadata"]["name"]: item for item in of_kind(render(chart, name="blue"), "ClusterRole")}
    assert roles["blue-ballast"]["rules"] == operator_rules()
    for role in people_roles():
        name = role["metadata"]["name"].replace("ballast", "blue-ballast")
        assert roles[name]["rules"] == role["rules"]
        aggregation = {k: v for k, v in role["metadata"]["labels"].items() if "aggregate-to" in k}
        assert aggregation.items() <= roles[name]["metadata"]["labels"].items()
    (binding,) = of_kind(render(chart, name="blue"), "ClusterRoleBinding")
    assert binding["subjects"][0]["name"] == "blue-ballast"


@pytest.mark.slow
def test_the_page_is_off_unless_it_is_asked_for(chart: Any) -> None:
    """Then it has a port, a Service, the right to ask who somebody is, and a hole in the NetworkPolicy.

    Whoever may scrape, `helm test` may ask, too.
    """
    plain = render(chart, {"networkPolicy": {"enabled": True}})
    assert '"ui"' not in json.dumps(plain)
    items = render(chart, EVERYTHING)
    (role,) = [item for item in of_kind(items, "ClusterRole") if item["metadata"]["name"] == "ballast"]
    assert role["rules"] == [*operator_rules(), *kueue_rules(), *page_rules()]
    (service,) = [i for i in of_kind(items, "Service") if i["metadata"]["name"] == "ballast-ui"]
    assert service["spec"]["ports"] == [{"name": "ui", "port": 8091, "targetPort": "ui", "protocol": "TCP"}]
    assert service["spec"]["selector"] == of_kind(items, "Deployment")[0]["spec"]["selector"]["matchLabels"]
    (policy,) = of_kind(items, "NetworkPolicy")
    hole = {"ports": [{"port": "ui", "protocol": "TCP"}], "from": [{"podSelector": {}}]}
    assert hole in policy["spec"]["ingress"]
    (tester,) = of_kind(items, "Pod")
    *_, peer = policy["spec"]["ingress"][0]["from"]
    assert peer["podSelector"]["matchLabels"] == tester["metadata"]["labels"]
    (dashboards,) = [item for item in of_kind(items, "ConfigMap") if "ballast-job.json" in item["data"]]
    for text in dashboards["data"].values():
        (page,) = [each for each in json.loads(text)["templating"]["list"] if each["name"] == "page"]
        assert page["query"] == "https://ballast.example.com"


@pytest.mark.slow
def test_history_is_a_file_on_a_volume_that_outlives_the_release(
    chart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one replica, which ends before its successor begins; or in PostgreSQL, by a Secret that any read."""
    from ballast_operator.cli.operator import operator

    values = {"history": {"enabled": True, "days": 30, "volume": {"storageClass": "ssd"}}}
    items = render(chart, values)
    (claim,) = of_kind(items, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["storageClassName"] == "ssd"
    (deployment,) = of_kind(items, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (file,) = [each["value"] for each in container["env"] if each["name"] == "BALLAST_HISTORY"]
    monkeypatch.setenv("BALLAST_HISTORY", file)
    context = operator.make_context("operator", container["args"][1:])
    assert (context.params["history"], context.params["history_days"]) == (file, 30)
    assert Path(file).parent == Path(container["volumeMounts"][-1]["mountPath"])
    assert pod["volumes"][-1]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    mine = {"history": {"enabled": True, "volume": {"existingClaim": "mine"}}}
    assert of_kind(render(chart, mine), "PersistentVolumeClaim") == []
    with pytest.raises(helm.HelmError, match="To fix: replicas: 1"):
        render(chart, {**values, "replicas": 2})
    values["history"]["postgresql"] = {"secret": "history-app", "port": 6432}
    items = render(chart, {**values, "replicas": 2, "networkPolicy": {"enabled": True}})
    (deployment,) = of_kind(items, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    reference = {"secretKeyRef": {"name": "history-app", "key": "uri"}}
    assert {"name": "BALLAST_HISTORY", "valueFrom": reference} in container["env"]
    assert deployment["spec"]["strategy"]["type"] == "RollingUpdate"
    assert of_kind(items, "PersistentVolumeClaim") == [] and "/var/lib/ballast" not in json.dumps(deployment)
    (policy,) = of_kind(items, "NetworkPolicy")
    assert {"port": 6432, "protocol": "TCP"} in policy["spec"]["egress"][0]["ports"]


@pytest.mark.slow
def test_an_image_digest_wins_over_the_tag(chart: Any) -> None:
    digest = "sha256:" + "0" * 64
    values = {"image": {"repository": "r/operator", "tag": "x", "digest": digest}}
    (deployment,) = of_kind(render(chart, values), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == f"r/operator@{digest}"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": "two"}, "replicas"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"metrics": {"port": 70000}}, "port"),
        ({"settings": {"JOB_BIND_SECONDS": 0}}, "JOB_BIND_SECONDS"),
        ({"settings": {"JOB_BINDING_SECONDS": 3}}, "BINDING"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
        ({"watchNamespace": "Research Team"}, "watchNamespace"),
        ({"ui": {"enabled": True, "port": 8080}}, "another ui.port"),
        ({"validation": {"enabled": True, "port": 8080}}, "another validation.port"),
        ({"ui": {"url": "ballast.example.com"}}, "url"),
        ({"dnsPolicy": "None"}, "dnsPolicy"),
        ({"crds": {"keep": None}}, "keep"),
        ({"history": None}, "history"),
        ({"history": {"volume": {"size": "1.2.3"}}}, "size"),
        ({"fullnameOverride": "Foo"}, '"Foo" cannot name a Service.*To fix: another fullnameOverride'),
        ({"image": {"repository": "registry.example.com:5000/operator:1"}}, "repository"),
        ({"serviceAccount": {"name": "a b"}}, "name"),
        ({"trainer": {"resources": {"request": {"cpu": 4}}}}, "request"),
        ({"trainer": {"resources": {"requests": {"cpu": "lots"}}}}, "cpu"),
        ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "podLabels"),
        ({"podDisruptionBudget": {"minAvailable": "one"}}, "minAvailable"),
        ({"extraEnv": [{"name": "TZ", "value": 1}]}, "extraEnv"),
        ({"extraEnv": [{"name": "OMP_NUM_THREADS", "value": "4"}]}, "OMP_NUM_THREADS is set already"),
        (
            {"settings": {"JOB_BIND_SECONDS": 9}, "extraEnv": [{"name": "BALLAST_JOB_BIND_SECONDS"}]},
            "BALLAST_JOB_BIND_SECONDS is set already",
        ),
        ({"extraEnv": [{"name": "TZ"}, {"name": "TZ"}]}, "TZ is set already"),
        ({"affinity": {"podAntiAfinity": {}}}, "podAntiAfinity"),
        ({"admissionPolicies": {"namespaceSelector": {"team": "a"}}}, "team"),
        ({"networkPolicy": {"metricsFrom": [{}]}}, "metricsFrom"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_refused_by_name(chart: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError, match=words):
        render(chart, values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r" * 53, "r" * 51 + "-r"])
def test_a_release_has_a_name_as_long_as_helm_takes(chart: Any, name: str) -> None:
    """The API server takes Services and values of labels of at most 63 characters."""
    items = render(chart, EVERYTHING, name=name, namespace="n" * 63)
    services = [item["metadata"]["name"] for item in of_kind(items, "Service")]
    assert len(services) == 3 and all(re.fullmatch(r"[a-z][-a-z0-9]{,61}[a-z0-9]", each) for each in services)
    (hook,) = of_kind(items, "ValidatingWebhookConfiguration")
    assert hook["webhooks"][0]["clientConfig"]["service"]["name"] in services
    assert all(len(label) <= 63 for item in items for label in item["metadata"].get("labels", {}).values())


@pytest.mark.slow
def test_names_that_yaml_would_read_as_numbers_stay_names(chart: Any) -> None:
    """Namespaces, releases and Secrets may be called 123, on or true; so may base64 look."""
    values = {
        **EVERYTHING,
        "validation": {"enabled": True, "caBundle": "8080"},
        "watchNamespace": "123",
        "fullnameOverride": "on",
        "serviceAccount": {"name": "1e3"},
        "priorityClassName": "10",
        "trainer": {"metricsPort": 9000, "podMonitor": {"enabled": True}},
        "history": {"enabled": True, "postgresql": {"secret": "true", "key": "7"}},
    }
    items = render(chart, values, name="12", namespace="34")
    (deployment,), (monitor,) = of_kind(items, "Deployment"), of_kind(items, "PodMonitor")
    pod = deployment["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("valueFrom") for each in pod["containers"][0]["env"]}
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("10", "1e3")
    assert environment["BALLAST_HISTORY"] == {"secretKeyRef": {"name": "true", "key": "7"}}
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["123"]}
    (webhook,) = of_kind(items, "ValidatingWebhookConfiguration")[0]["webhooks"]
    assert webhook["clientConfig"]["caBundle"] == "8080"
    assert webhook["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "123"}}
    (binding,) = of_kind(items, "ClusterRoleBinding")
    assert binding["metadata"]["annotations"] == {"ballast.dev/watch-namespace": "123"}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "1e3", "namespace": "34"}]
    assert binding["roleRef"]["name"] == deployment["metadata"]["name"] == "on"
    for item in items:
        metadata = item["metadata"]
        texts = [metadata["name"], metadata.get("namespace", ""), *metadata.get("labels", {}).values()]
        assert all(isinstance(text, str) for text in texts), metadata


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(CHART.glob("values-*.yaml")), ids=lambda file: file.stem)
def test_the_values_of_a_platform_are_taken(chart: Any, file: Path) -> None:
    """Two replicas that are spread, and may be drained; the API server's port; no warning."""
    values = yaml.safe_load(file.read_text())
    objects = render(chart, values | {"networkPolicy": values["networkPolicy"] | {"enabled": True}})
    (deployment,) = of_kind(objects, "Deployment")
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["replicas"] == 2
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == 1
    for part in ("affinity", "nodeSelector", "tolerations", "imagePullSecrets"):
        assert pod["spec"].get(part) == values.get(part), part
    (account,) = of_kind(objects, "ServiceAccount")
    given = values.get("serviceAccount", {}).get("annotations", {})
    assert given.items() <= (account["metadata"].get("annotations") or {}).items()
    (policy,) = of_kind(objects, "NetworkPolicy")
    ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())]
    assert set(values["networkPolicy"]["apiServerPorts"]) <= set(ports)
    notes = chart.render(values, name="ballast", namespace="x")["ballast/templates/NOTES.txt"]
    assert "Note:" not in notes


def test_every_value_is_in_the_schema() -> None:
    """With additionalProperties false all the way down, so that no misspelling goes unnoticed.

    Null takes a default away. One that is not empty is required: without crds.keep the jobs would go with the
    release, without admissionPolicies.enabled there are no policies.
    """
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(part: dict[str, Any], value: dict[str, Any], path: str) -> None:
        assert part["additionalProperties"] is False, path
        assert value.keys() <= part["properties"].keys(), path
        for name, inner in value.items():
            if isinstance(inner, dict) and "properties" in part["properties"][name]:
                check(part["properties"][name], inner, f"{path}.{name}")
            if inner and "resources" not in f"{path}.{name}":
                assert name in part["required"], f"{path}.{name}"

    check(schema, values, "values")
    names = {
        f"{group}_{field.name}".upper()
        for group in ("api", "job", "solver", "leader")
        for field in dataclasses.fields(getattr(Settings(), group))
        if field.name.endswith("_seconds")
    }
    assert set(schema["properties"]["settings"]["propertyNames"]["enum"]) == names


def test_the_notes_warn_of_what_may_surprise(chart: Any) -> None:
    """A disruption budget that would block every drain; CRDs that go with the release."""
    plain = chart.render({}, name="ballast", namespace="x")["ballast/templates/NOTES.txt"]
    risky = chart.render(
        {"podDisruptionBudget": {"enabled": True}, "crds": {"keep": False}}, name="ballast", namespace="x"
    )["ballast/templates/NOTES.txt"]
    assert "Note:" not in plain
    assert risky.count("Note:") == 2
    for example in re.findall(r"examples/\S+\.yaml", plain):
        assert (ROOT / example).is_file()


@pytest.mark.slow
def test_the_image_and_the_chart_agree(chart: Any) -> None:
    """The pod runs as the image's user, and the image's entry point takes the pod's arguments."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    (deployment,) = of_kind(render(chart), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    user = pod["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in dockerfile
    assert 'ENTRYPOINT ["ballast"]' in dockerfile
    assert "command" not in pod["containers"][0]
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source


@pytest.mark.api
def test_the_chart_installs_upgrades_and_leaves_nothing_behind(
    control_plane: ControlPlane, namespace: str
) -> None:
    """On a real API server: all objects are taken, an upgrade changes them, a rollback takes that back.

    Nothing stays behind, so that it can be installed again.
    """
    from kubernetes import client

    values = {
        **EVERYTHING,
        "crds": {"install": False},
        "metrics": {"dashboards": {"enabled": True}},
        "fullnameOverride": f"ballast-{namespace}",
    }
    with (
        helm.Config(kubeconfig_path=str(control_plane.kubeconfig), namespace=namespace) as release,
        control_plane.client() as api,
    ):
        release.install(str(CHART), "one", values, namespace=namespace, timeout=LIMIT)
        apps, rbac = client.AppsV1Api(api), client.RbacAuthorizationV1Api(api)
        assert apps.read_namespaced_deployment(f"ballast-{namespace}", namespace).spec.replicas == 2
        release.upgrade(str(CHART), "one", {**values, "replicas": 3}, namespace=namespace, timeout=LIMIT)
        assert apps.read_namespaced_deployment(f"ballast-{namespace}", namespace).spec.replicas == 3
        release.rollback("one", version=1, timeout=LIMIT)
        assert apps.read_namespaced_deployment(f"ballast-{namespace}", namespace).spec.replicas == 2
        more = {**values, "fullnameOverride": f"more-{namespace}", "watchNamespace": "elsewhere"}
        with pytest.raises(Exception, match=f"release one has the operator of namespace {namespace}"):
            release.install(str(CHART), "two", more, namespace=namespace, timeout=LIMIT)
        other = f"{namespace}-more"
        client.CoreV1Api(api).create_namespace({"metadata": {"name": other}})
        with helm.Config(kubeconfig_path=str(control_plane.kubeconfig), namespace=other) as second:
            for watched in ("", "research"):  # the jobs of the first: each would lead by a Lease of its own
                both = {**more, "watchNamespace": watched}
                with pytest.raises(Exception, match=f"operator of Ballast in namespace {namespace} looks"):
                    second.install(str(CHART), "two", both, namespace=other, timeout=LIMIT)
            second.install(str(CHART), "two", more, namespace=other, timeout=LIMIT)
            second.uninstall("two", timeout=LIMIT)
        release.uninstall("one", timeout=LIMIT)
        release.install(str(CHART), "one", values, namespace=namespace, timeout=LIMIT)
        release.uninstall("one", timeout=LIMIT)
        left = [
            role.metadata.name for role in rbac.list_cluster_role().items if namespace in role.metadata.name
        ]
        assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, True], ids=["as the kubelet tells it", "by name"])
def test_the_release_is_tested_without_cluster_dns(chart, by_name):
    """`helm test` asks the Service at the address that the kubelet gives to its pod."""
    (pod,) = [item for item in render(chart) if item["kind"] == "Pod"]
    (script,) = pod["spec"]["containers"][0]["command"][2:]
    asked = []

    def answer(url, timeout):
        asked.append(url)
        return io.BytesIO(b"ok ballast_leader 1")

    told = {} if by_name else {"BALLAST_METRICS_SERVICE_HOST": "10.0.0.7"}
    with mock.patch.dict(os.environ, told), mock.patch("urllib.request.urlopen", answer):
        exec(script, {})
    host = "ballast-metrics" if by_name else "10.0.0.7"
    assert asked == [f"http://{host}:8080/healthz", f"http://{host}:8080/metrics"]


@pytest.mark.slow
def test_what_trainers_have_by_default_reaches_the_operator(chart: Any) -> None:
    """The values become the template that it fills in, which it can read; without them it gets none."""
    from ballast_operator.api.template import PodTemplate

    trainer = {
        "image": "registry.example.com/ballast/trainer:0.1.0",
        "imagePullSecrets": [{"name": "registry"}],
        "resources": {"requests": {"cpu": "4"}},
        "checkpointClaim": "checkpoints",
        "readOnlyRootFilesystem": True,
        "metricsPort": 9000,
        "podMonitor": {"enabled": True},
    }

    def told(values: dict[str, Any]) -> list[str]:
        (deployment,) = of_kind(render(chart, values), "Deployment")
        env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        return [variable["value"] for variable in env if variable["name"] == "BALLAST_TRAINER_TEMPLATE"]

    assert told({}) == []
    (text,) = told({"trainer": trainer})
    spec = PodTemplate.model_validate_json(text).as_object()["spec"]
    (container,) = spec["containers"]
    assert container["image"] == trainer["image"]
    assert container["resources"] == trainer["resources"]
    assert container["securityContext"] == {"readOnlyRootFilesystem": True}
    assert container["volumeMounts"] == [
        {"name": "checkpoints", "mountPath": "/checkpoints"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    assert spec["volumes"] == [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "10Gi"}},
    ]
    assert container["env"] == [{"name": "BALLAST_METRICS_PORT", "value": "9000"}]
    (monitor,) = of_kind(render(chart, {"trainer": trainer}), "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == container["ports"][0]["name"]
    assert monitor["spec"]["selector"]["matchLabels"] == {RANK_LABEL: "0"}
    with pytest.raises(helm.HelmError, match="metricsPort"):
        render(chart, {"trainer": {"podMonitor": {"enabled": True}}})
