"""A trainer pod: the user's template and what the operator adds."""

import copy

import pytest
from ballast_operator.desired.pod import PodOptions, pod_object
from ballast_operator.kube.slim import pinned_node
from ballast_policies.contract import JOB_LABEL, LAUNCH_LABEL, RANK_LABEL

from tests.operator.steps.contexts import PODS, a_running_view
from tests.operator.views.builders import a_config, a_spec

GPU = "nvidia.com/gpu"


def built(template=None, per_pod=1, save_seconds=60.0, **spec):
    template = (
        {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}}
        if template is None
        else template
    )
    view = a_running_view()
    allocation = view.status.allocation.replace(gpus_per_pod=per_pod)
    return pod_object(
        view,
        a_spec(template=template, **spec),
        allocation.with_pods(dict(zip(PODS, "abcd", strict=True))),
        number=2,
        pod=PODS[2],
        gpu_resource=GPU,
        options=PodOptions(save_seconds=save_seconds),
    )


def environment(pod):
    return {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}


def test_a_pod_is_pinned_to_its_node_and_labelled_with_job_launch_and_rank():
    """kube-scheduler still binds it: spec.nodeName stays empty."""
    pod = built()
    assert pod["metadata"]["name"] == PODS[2]
    assert "nodeName" not in pod["spec"] and pinned_node(pod) == "c"
    labels = pod["metadata"]["labels"]
    assert (labels[JOB_LABEL], labels[LAUNCH_LABEL], labels[RANK_LABEL]) == ("job", "1", "2")


def test_every_pod_asks_for_one_gpu_of_its_pool_and_is_never_restarted():
    """A pod that ends is the operator's to replace."""
    spec = built()["spec"]
    resources = spec["containers"][0]["resources"]
    assert (resources["requests"][GPU], resources["limits"][GPU]) == ("1", "1")
    assert spec["restartPolicy"] == "Never"


def test_a_pod_of_several_ranks_gets_their_gpus_and_shared_memory():
    """A GPU for each rank, one process each, and /dev/shm of a size for all of them."""
    pod = built(per_pod=4)
    (container,) = pod["spec"]["containers"]
    assert (container["resources"]["requests"][GPU], container["resources"]["limits"][GPU]) == ("4", "4")
    assert environment(pod)["BALLAST_POD_RANKS"] == "4"
    (volume,) = pod["spec"]["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "4096Mi"}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]


def test_a_pod_of_one_rank_has_no_volume_for_shared_memory():
    """Nothing shares memory with it."""
    pod = built()
    assert "volumes" not in pod["spec"]
    assert environment(pod)["BALLAST_POD_RANKS"] == "1"


def test_shared_memory_of_the_template_is_kept():
    """A user who sizes it for its data loaders knows better."""
    mount, volume = {"name": "mine", "mountPath": "/dev/shm/"}, {"name": "mine", "emptyDir": {}}
    container = {"name": "trainer", "image": "trainer:1", "volumeMounts": [mount]}
    pod = built({"spec": {"containers": [container], "volumes": [volume]}}, per_pod=2)
    assert pod["spec"]["volumes"] == [volume]
    assert pod["spec"]["containers"][0]["volumeMounts"] == [mount]


def test_the_template_keeps_what_the_user_wrote():
    """Labels, annotations, side cars, affinity, command and environment; the template is not changed."""
    zone = {"key": "zone", "operator": "In", "values": ["x"]}
    template = {
        "metadata": {"labels": {"team": "vision", JOB_LABEL: "other"}, "annotations": {"note": "mine"}},
        "spec": {
            "containers": [
                {
                    "name": "trainer",
                    "image": "mine:2",
                    "command": ["python", "train.py"],
                    "env": [{"name": "BALLAST_CHECKPOINT_PATH", "value": "/mine"}],
                    "resources": {"limits": {"cpu": "4"}},
                },
                {"name": "sidecar", "image": "logs:1"},
            ],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [zone]}]
                    }
                }
            },
        },
    }
    before = copy.deepcopy(template)
    pod = built(template)
    assert template == before
    assert pod["metadata"]["labels"]["team"] == "vision" and pod["metadata"]["labels"][JOB_LABEL] == "job"
    assert pod["metadata"]["annotations"]["note"] == "mine"
    trainer, sidecar = pod["spec"]["containers"]
    assert trainer["command"] == ["python", "train.py"]
    assert (sidecar["name"], sidecar["image"]) == ("sidecar", "logs:1")
    assert environment(pod)["BALLAST_CHECKPOINT_PATH"] == "/mine"
    assert trainer["resources"]["limits"] == {"cpu": "4", GPU: "1"}
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"][0]["matchExpressions"] == [zone] and pinned_node(pod) == "c"


@pytest.mark.parametrize(("grace", "want"), [(None, "30"), (120, "120"), (0, "1")])
def test_the_trainer_knows_how_long_it_may_save_after_sigterm(grace, want):
    """The pod's own grace period, Kubernetes' default without one, at least a second."""
    spec = {"containers": [{"name": "trainer", "image": "trainer:1"}]}
    if grace is not None:
        spec["terminationGracePeriodSeconds"] = grace
    assert environment(built({"spec": spec}))["BALLAST_STOP_SECONDS"] == want


@pytest.mark.parametrize(
    ("grace", "spec", "want"),
    [
        (None, {"grow": True}, "15"),
        (600, {"grow": True}, "540"),
        (15, {"grow": True}, None),
        (600, {"grow": False}, None),
        (600, {"grow": True, "config": a_config(pipeline={"minStages": 4, "maxStages": 4})}, None),
    ],
    ids=["the usual grace", "a long one", "time to save only", "inelastic", "one size"],
)
def test_ranks_of_elastic_jobs_know_how_long_they_may_wait_to_be_released(grace, spec, want):
    """Half of the grace, or all but what a trainer may take to save; nothing where no plan releases them."""
    content = {"containers": [{"name": "trainer", "image": "trainer:1"}]}
    if grace is not None:
        content["terminationGracePeriodSeconds"] = grace
    found = environment(built({"spec": content}, **spec))
    assert found.get("BALLAST_HANDOVER_SECONDS") == want


def test_a_container_without_a_command_runs_the_trainer():
    """`ballast-train pod`, with the job's name and checkpoint path in its environment."""
    pod = built(config=a_config(checkpoint={"path": "/data"}))
    assert pod["spec"]["containers"][0]["command"] == ["ballast-train", "pod"]
    found = environment(pod)
    assert found["BALLAST_JOB_UID"] == "uid-job"
    assert (found["BALLAST_JOB"], found["BALLAST_NAMESPACE"], found["BALLAST_CHECKPOINT_PATH"]) == (
        "job",
        "team",
        "/data",
    )


def test_a_process_that_ends_without_a_message_is_explained_by_its_log():
    """Where the template does not choose otherwise."""
    assert built()["spec"]["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    template = {"spec": {"containers": [{"name": "trainer", "terminationMessagePolicy": "File"}]}}
    assert built(template)["spec"]["containers"][0]["terminationMessagePolicy"] == "File"


def test_autoscalers_are_asked_to_leave_a_gangs_nodes_alone_unless_the_template_says_otherwise():
    """Karpenter then drains a node that is taken back only once the gang has left it."""
    spared = {
        "karpenter.sh/do-not-disrupt": "true",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    }
    container = {"containers": [{"name": "trainer", "image": "mine:2"}]}
    assert built({"spec": container})["metadata"]["annotations"] == spared
    own = {"karpenter.sh/do-not-disrupt": "false"}
    template = {"metadata": {"annotations": own}, "spec": container}
    assert built(template)["metadata"]["annotations"] == {**spared, **own}
