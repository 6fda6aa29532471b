"""``ballast migrate``: what comes out is a TrainingJob, and what does not come along is named."""

import pytest
import yaml
from ballast_operator.api.read import read_training_job
from ballast_operator.cli.main import main
from ballast_operator.cli.migrate import converted
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

PYTORCH = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: ddp
  namespace: team
  annotations: {kubectl.kubernetes.io/last-applied-configuration: "{}", kept: "yes"}
spec:
  nprocPerNode: "8"
  runPolicy: {backoffLimit: 5, cleanPodPolicy: None, activeDeadlineSeconds: 60}
  pytorchReplicaSpecs:
    Master: &role
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          nodeSelector: {zone: a}
          containers:
            - name: pytorch
              image: ddp:1
              command: [torchrun, --nnodes=4, train.py]
              resources: {limits: {nvidia.com/gpu: 8, memory: 64Gi}, requests: {nvidia.com/gpu: 8}}
    Worker: {<<: *role, replicas: 3}
"""
TRAIN = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: llm}
spec:
  runtimeRef: {name: torch-distributed}
  suspend: true
  initializer: {dataset: {storageUri: "hf://data"}}
  trainer:
    image: llm:1
    command: [python, train.py]
    numNodes: 2
    env: [{name: LR, value: "0.1"}]
    resourcesPerNode: {limits: {nvidia.com/gpu: "1"}}
"""
RAY = """
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: 9Ray_Job}
spec:
  entrypoint: python train.py --lr 0.1
  ttlSecondsAfterFinished: 60
  shutdownAfterJobFinishes: true
  rayClusterSpec:
    rayVersion: "2.50"
    headGroupSpec: {template: {spec: {containers: [{name: head, image: ray:1}]}}}
    workerGroupSpecs:
      - groupName: gpu
        replicas: 2
        minReplicas: 1
        maxReplicas: 4
        rayStartParams: {num-gpus: "1"}
        template: {spec: {containers: [{name: w, image: ray:1, resources: {limits: {nvidia.com/gpu: 1}}}]}}
      - {groupName: cpu, template: {spec: {containers: [{name: w, image: ray:1}]}}}
"""
ADAPTDL = """
apiVersion: adaptdl.petuum.com/v1
kind: AdaptDLJob
metadata: {generateName: ncf-}
spec:
  minReplicas: 1
  maxReplicas: 4
  preemptible: false
  template:
    spec:
      restartPolicy: OnFailure
      containers:
        - {name: main, image: ncf, command: [python3, main.py], resources: {limits: {nvidia.com/gpu: 1}}}
"""


def migrated(text, *options):
    """(the spec that the operator reads, the lines about it)."""
    done = CliRunner().invoke(main, ["migrate", "-", *options], input=text)
    assert done.exit_code == 0, done.output
    (job,) = yaml.safe_load_all(done.stdout)
    read_training_job(job)
    return job, done.stderr


def test_a_pytorchjob_keeps_its_pods_and_its_policy():
    """Four pods of eight GPUs; the flags that torchrun reads from the environment are named."""
    job, said = migrated(PYTORCH, "--steps", "100", "--checkpoint", "/data/ddp")
    spec = job["spec"]
    assert job["metadata"] == {"name": "ddp", "namespace": "team", "annotations": {"kept": "yes"}}
    assert spec["pipeline"] == {"minStages": 32, "maxStages": 32}
    assert spec["parallelism"] == {"gpusPerPod": 8}
    assert (spec["totalSteps"], spec["backoffLimit"], spec["checkpoint"]["path"]) == (100, 5, "/data/ddp")
    pod = spec["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"memory": "64Gi"}}
    assert pod["nodeSelector"] == {"zone": "a"}
    assert spec["activeDeadlineSeconds"] == 60 and "activeDeadlineSeconds" not in said
    assert "ddp: not carried over: spec.runPolicy.cleanPodPolicy" in said
    assert "--nnodes=4: torchrun reads them" in said and "nprocPerNode" not in said


def test_two_jobs_of_one_name_are_to_be_corrected():
    """The end, which is cut, may be what tells them apart: the second would take the place of the first."""
    names = [f"resnet50-imagenet-lr-0-001-batch-256-epochs-90-seed-{seed}" for seed in (1, 2)]
    items = [{**yaml.safe_load(PYTORCH), "metadata": {"name": name}} for name in names]
    done = CliRunner().invoke(main, ["migrate", "-"], input=yaml.safe_dump_all(items))
    assert done.exit_code == 1 and done.stderr.count("would be replaced") == 1
    items[1]["metadata"]["namespace"] = "other"
    assert CliRunner().invoke(main, ["migrate", "-"], input=yaml.safe_dump_all(items)).exit_code == 0


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb"])
def test_the_container_with_gpus_is_the_one_that_trains(resource):
    """Behind a sidecar, and by the name that its device plugin has for a GPU or a slice of one."""
    item = yaml.safe_load(PYTORCH.replace("nvidia.com/gpu", resource))
    pod = item["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]  # the Master's as well
    pod["containers"].insert(0, {"name": "log", "image": "log:1"})
    job, said = migrated(yaml.safe_dump(item))
    assert job["spec"]["pipeline"] == {"minStages": 32, "maxStages": 32}
    containers = job["spec"]["template"]["spec"]["containers"]
    assert [one["name"] for one in containers] == ["pytorch", "log"]
    assert containers[0]["resources"] == {"limits": {"memory": "64Gi"}}
    assert (f"gpuResource: {resource}" in said) == (resource != "nvidia.com/gpu")


def test_an_elastic_pytorchjob_keeps_its_bounds():
    """And says which of two templates it has."""
    item = yaml.safe_load(PYTORCH)
    item["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 8, "rdzvBackend": "c10d"}
    item["spec"]["pytorchReplicaSpecs"]["Master"] = {
        "template": {"spec": {"containers": [{"name": "other"}]}}
    }
    job, said = migrated(yaml.safe_dump(item))
    assert job["spec"]["pipeline"] == {"minStages": 8, "maxStages": 64}
    assert "Master's template differs from Worker's" in said
    assert "not carried over: spec.elasticPolicy.rdzvBackend" in said
    assert "totalSteps: 1000000 stands for" in said


def test_a_trainjob_says_what_its_runtime_had():
    """Image, command and environment are its own; runtime and initializer are named."""
    job, said = migrated(TRAIN, "--steps", "5")
    assert job["spec"]["suspend"] is True
    assert job["spec"]["pipeline"] == {"minStages": 2, "maxStages": 2}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["env"]) == ("llm:1", [{"name": "LR", "value": "0.1"}])
    assert "not carried over: spec.runtimeRef" in said and "not carried over: spec.initializer" in said
    bare = yaml.safe_load(TRAIN)
    bare["spec"]["trainer"] = {"numNodes": 2}
    done = CliRunner().invoke(main, ["migrate", "-"], input=yaml.safe_dump(bare))
    assert (
        done.exit_code == 0 and "image: the manifest leaves it" in done.stderr and "command:" in done.stderr
    )


def test_a_rayjob_is_its_workers_and_its_entrypoint():
    """Head and further groups are named, and that there is no Ray cluster."""
    job, said = migrated(RAY)
    assert job["metadata"]["name"] == "ray-job" and "'9Ray_Job'" in said
    assert job["spec"]["pipeline"] == {"minStages": 2, "maxStages": 2}
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == [
        "python",
        "train.py",
        "--lr",
        "0.1",
    ]
    assert "without a Ray cluster" in said
    for field in ("headGroupSpec", "workerGroupSpecs[1]", "workerGroupSpecs[0].rayStartParams"):
        assert f"not carried over: spec.rayClusterSpec.{field}" in said
    alone = yaml.safe_load(RAY)
    alone["spec"]["rayClusterSpec"] = {
        "headGroupSpec": alone["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    }
    job, said = migrated(yaml.safe_dump(alone))
    assert job["spec"]["pipeline"] == {"minStages": 2, "maxStages": 2}
    assert "not carried over: spec.rayClusterSpec.headGroupSpec.rayStartParams" in said


@pytest.mark.parametrize(
    ("text", "old", "new", "stages", "per_pod"),
    [
        (TRAIN, 'resourcesPerNode: {limits: {nvidia.com/gpu: "1"}}', "numProcPerNode: 4", (8, 8), 4),
        (RAY, 'rayVersion: "2.50"', "enableInTreeAutoscaling: true", (1, 4), None),
        (RAY, "minReplicas: 1\n        maxReplicas: 4", "minReplicas: 0", (2, 2), None),
        (
            RAY.replace('rayVersion: "2.50"', "enableInTreeAutoscaling: true"),
            "minReplicas: 1\n        maxReplicas: 4",
            "minReplicas: 0\n        maxReplicas: 2147483647",
            (1, 1024),
            None,
        ),
    ],
    ids=["processes of a node", "autoscaler", "no autoscaler", "an autoscaler without bounds"],
)
def test_a_job_has_as_many_gpus_as_where_it_comes_from(text, old, new, stages, per_pod):
    """Where they are not resources of its container, or change."""
    assert old in text
    job, said = migrated(text.replace(old, new))
    assert tuple(job["spec"]["pipeline"].values()) == stages
    assert job["spec"].get("parallelism", {}).get("gpusPerPod") == per_pod
    assert "checkpoint.path: not known. To fix: --checkpoint" in said
    assert ("metadata.name" in said) == (text is not TRAIN)


def test_an_adaptdljob_keeps_its_bounds():
    """Its name was made by the API server; a job that may not be stopped says that it may be."""
    job, said = migrated(ADAPTDL)
    assert job["metadata"]["name"] == "ncf"
    assert job["spec"]["pipeline"] == {"minStages": 1, "maxStages": 4}
    assert "not carried over: spec.preemptible" in said and "restartPolicy" in said


@pytest.mark.parametrize("text", [PYTORCH, TRAIN, RAY, ADAPTDL], ids=["pytorch", "train", "ray", "adaptdl"])
def test_a_field_that_is_not_known_is_named(text):
    """At the top of the spec and inside: nothing is lost in silence."""
    item = yaml.safe_load(text)
    item["spec"]["newField"] = {"a": 1}
    inner = item["spec"].get("runPolicy") or item["spec"].get("trainer") or item["spec"].get("rayClusterSpec")
    if inner is not None:
        inner["another"] = [1]
    said = "\n".join(converted(item)[1])
    assert "not carried over: spec.newField" in said
    assert inner is None or ".another" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: Job\napiVersion: batch/v1", "batch/v1 'Job' is not known here"),
        ("kind: RayJob\napiVersion: ray.io/v1", "no group"),
        ("kind: PyTorchJob\napiVersion: kubeflow.org/v1\nspec: 3", "neither Master nor Worker"),
        (PYTORCH.replace("replicas: 3", "replicas: many"), "'many' is no number"),
        (ADAPTDL.replace("containers:", "other:"), "no containers"),
        (ADAPTDL.replace("minReplicas: 1", "minReplicas: .nan"), "nan is no number"),
    ],
    ids=range(6),
)
def test_what_is_no_such_job_is_refused_in_words(text, says):
    done = CliRunner().invoke(main, ["migrate", "-"], input=text)
    assert done.exit_code == 1 and says in done.stderr and "To fix: " in done.stderr
    assert isinstance(done.exception, SystemExit)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.sampled_from([PYTORCH, TRAIN, RAY, ADAPTDL]), st.integers(0, 40), VALUES)
def test_any_value_in_any_place_is_taken_named_or_refused(text, place, value):
    """A manifest of another version, or a hostile one: a TrainingJob, or a message."""
    item, paths = yaml.safe_load(text), []

    def walk(part):
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            paths.append((part, key))
            if isinstance(part[key], dict | list):
                walk(part[key])

    walk(item)
    part, key = paths[place % len(paths)]
    part[key] = value
    done = CliRunner().invoke(main, ["migrate", "-"], input=yaml.safe_dump(item))
    assert done.exit_code in (0, 1), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 0 or done.stderr
