"""The objects of a job: labels and owner, rights, Lease, plan, a script's environment, and its pods."""

import copy
import datetime

import pytest
from ballast_operator.desired import (
    TRAINER_GROUP,
    VOLUME,
    PodOptions,
    access_objects,
    gpus_elsewhere,
    lease_object,
    owned,
    plan_object,
    pod_object,
    rendezvous_object,
    restricted,
    script_environment,
)
from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import LEASE
from ballast_policies.contract.messages import (
    JOB_LABEL,
    LAUNCH_LABEL,
    RANK_LABEL,
    lease_name,
    plan_config_map_name,
    rendezvous_config_map_name,
    rendezvous_key,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.steps.contexts import NOW, PODS, a_running_view
from tests.operator.views.builders import a_config, a_plan, a_spec, a_view


def test_an_object_of_a_job_is_labelled_and_owned_by_it():
    """Deleted with the job by the garbage collector; found by the job's label."""
    item = owned(a_running_view(), LEASE, "job", spec={"holderIdentity": ""})
    metadata = item["metadata"]
    assert (item["apiVersion"], item["kind"], item["spec"]) == (
        "coordination.k8s.io/v1",
        "Lease",
        {"holderIdentity": ""},
    )
    assert (metadata["namespace"], metadata["name"], metadata["labels"][JOB_LABEL]) == ("team", "job", "job")
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("TrainingJob", "job", "uid-job")
    assert owner["controller"] is True


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


def test_the_lease_is_named_after_the_job_and_left_to_the_trainer():
    """Only how long it lasts, in whole seconds: applying it again takes nothing from the trainer."""
    item = lease_object(a_running_view(), 59.5)
    assert item["metadata"]["name"] == lease_name("job")
    assert item["spec"] == {"leaseDurationSeconds": 60} and "annotations" not in item["metadata"]


CONFIG = a_config()


def written(**changes):
    arguments = {"now": NOW, "resource_version": None, **changes}
    return plan_object(a_running_view(), a_spec(config=CONFIG), a_plan(PODS), **arguments)


def test_the_time_of_writing_is_an_annotation_with_microseconds():
    """The wait for the acknowledgement is measured from it."""
    item = written(now=NOW + datetime.timedelta(microseconds=5))
    assert item["metadata"]["annotations"] == {"ballast.dev/written": "2026-01-01T12:00:00.000005Z"}


def test_a_plan_replaces_only_the_version_it_was_decided_on():
    """Without a version the object must not exist yet."""
    assert written(resource_version="7")["metadata"]["resourceVersion"] == "7"
    assert "resourceVersion" not in written()["metadata"]


SCRIPTED = ("job-1-0", "job-1-1", "job-1-2")


def variables(pod, *, gpus_per_pod=1):
    """Variable -> value, or where it comes from."""
    view = a_view(pods=SCRIPTED, plan=None, spec=a_spec())
    allocation = view.status.allocation.replace(gpus_per_pod=gpus_per_pod)
    listed = script_environment(view, a_spec(), allocation, pod=pod, save_seconds=12.5)
    assert len({each["name"] for each in listed}) == len(listed)
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in listed}


def test_a_pod_of_several_gpus_leaves_ranks_to_torchrun():
    """Its own options are there; a rank of the pod would be wrong for all but one process."""
    found = variables(1, gpus_per_pod=4)
    assert "RANK" not in found
    assert "LOCAL_RANK" not in found
    assert (found["PET_NNODES"], found["PET_NPROC_PER_NODE"], found["PET_NODE_RANK"]) == ("3", "4", "1")
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("12", "4")


def test_an_address_of_an_earlier_launch_is_not_used():
    view = a_view(pods=SCRIPTED, plan=None, spec=a_spec())
    allocation = view.status.allocation.replace(launch=2)
    written = rendezvous_object(view, allocation, "10.0.0.8")
    assert written["metadata"]["name"] == rendezvous_config_map_name(view.name)
    assert written["data"] == {rendezvous_key(2): "10.0.0.8"}


def test_the_client_library_learns_how_long_saving_may_take():
    """In seconds."""
    found = variables(0)
    assert (found["BALLAST_SAVE_SECONDS"], found["BALLAST_TOTAL_STEPS"]) == ("12.5", "100")


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
    assert volume == {"name": VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "4096Mi"}}
    assert container["volumeMounts"] == [{"name": VOLUME, "mountPath": "/dev/shm"}]


def test_a_pod_of_one_rank_has_no_volume_for_shared_memory():
    pod = built()
    assert "volumes" not in pod["spec"]
    assert environment(pod)["BALLAST_POD_RANKS"] == "1"


@pytest.mark.parametrize(
    ("name", "mounts"),
    [("mine", [{"name": "mine", "mountPath": "/dev/shm/"}]), (VOLUME, [])],
    ids=["mounted", "named"],
)
def test_shared_memory_of_the_template_is_kept(name, mounts):
    """A user who sizes it for its data loaders knows better."""
    volume = {"name": name, "emptyDir": {}}
    container = {"name": "trainer", "image": "trainer:1", "volumeMounts": mounts}
    pod = built({"spec": {"containers": [container], "volumes": [volume]}}, per_pod=2)
    assert pod["spec"]["volumes"] == [volume]
    assert pod["spec"]["containers"][0]["volumeMounts"] == mounts


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


@pytest.mark.parametrize(("every", "want"), [(0, None), (5, "3")])
def test_ranks_that_have_copies_in_memory_are_started_again(every, want):
    """As often as the pod is told; without copies a pod ends with its rank."""
    config = a_config(checkpoint={"path": "/data", "inMemoryEverySteps": every})
    assert environment(built(config=config)).get("BALLAST_RANK_RESTARTS") == want


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


def template(**parts):
    return {"spec": {"containers": [{"name": "trainer"}, {"name": "log"}], **parts}}


def asking(count, part="limits"):
    return {"resources": {part: {GPU: count}}}


@pytest.mark.parametrize(
    ("given", "gpus_per_pod", "field"),
    [
        (template(), 1, ""),
        (template(containers=[asking("1"), {}]), 1, ""),
        (template(containers=[asking(4)]), 4, ""),
        (template(containers=[asking(0), asking("0")]), 2, ""),
        ({}, 1, ""),
        (template(containers=[asking(1)]), 4, f"containers[0].resources.limits[{GPU}]: '1'"),
        (template(containers=[{}, asking(1)]), 1, f"containers[1].resources.limits[{GPU}]: '1'"),
        (template(initContainers=[asking(1, "requests")]), 1, f"initContainers[0].resources.requests[{GPU}]"),
        (template(containers=[{"resources": {"limits": {"amd.com/gpu": 1}}}, asking(0)]), 2, ""),
    ],
)
def test_gpus_of_the_ranks_or_none_may_be_stated(given, gpus_per_pod, field):
    """In the first container, as the operator would set it."""
    found = gpus_elsewhere(given, (GPU,), gpus_per_pod)
    assert found.startswith(f"spec.template.spec.{field}") and "To fix: " in found if field else found == ""


TRAINER = {"name": "trainer", "image": "trainer:1"}


def contexts(**spec):
    """(the pod's context, the first container's)."""
    spec = restricted({"containers": [TRAINER], **spec})
    return spec["securityContext"], spec["containers"][0]["securityContext"]


def test_a_template_without_security_context_gets_the_restricted_profile():
    """Another user than root, the runtime's seccomp profile, no capability, no way to gain one."""
    pod, container = contexts()
    assert pod["runAsNonRoot"] is True and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["fsGroup"] == TRAINER_GROUP
    assert container == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_every_container_gets_it():
    """Side cars and init containers, too."""
    spec = restricted({"containers": [TRAINER, {"name": "logs"}], "initContainers": [{"name": "fetch"}]})
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_template_overrides_one_field_and_keeps_the_others():
    """A group of its own for the volume, a capability for RDMA."""
    own = {**TRAINER, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 1000}}
    pod, container = contexts(securityContext={"fsGroup": 2000}, containers=[own])
    assert pod["fsGroup"] == 2000 and pod["runAsNonRoot"] is True
    assert container["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["runAsUser"] == 1000 and container["allowPrivilegeEscalation"] is False


def test_a_template_that_names_root_runs_as_root():
    """`runAsUser: 0` beside `runAsNonRoot: true` would never start."""
    pod, _ = contexts(securityContext={"runAsUser": 0})
    assert pod["runAsNonRoot"] is False
    _, container = contexts(containers=[{**TRAINER, "securityContext": {"runAsUser": 0}}])
    assert container["runAsNonRoot"] is False


@pytest.mark.parametrize("context", [{"privileged": True}, {"capabilities": {"add": ["SYS_ADMIN"]}}])
def test_a_privileged_container_is_not_contradicted(context):
    """The API server refuses `allowPrivilegeEscalation: false` beside it."""
    _, container = contexts(containers=[{**TRAINER, "securityContext": context}])
    assert "allowPrivilegeEscalation" not in container


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.slow
@given(
    context=anything,
    container=st.fixed_dictionaries(
        {},
        optional={
            "securityContext": anything
            | st.fixed_dictionaries({"capabilities": anything | st.fixed_dictionaries({"add": anything})})
        },
    ),
    containers=anything,
)
def test_fields_of_a_wrong_type_are_left_to_the_api_server(context, container, containers):
    """No template makes the builder fail, and the template is not changed."""
    for spec in ({"securityContext": context, "containers": [container]}, {"initContainers": containers}):
        before = copy.deepcopy(spec)
        restricted(spec)
        assert spec == before
