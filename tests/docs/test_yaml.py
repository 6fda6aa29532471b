"""The YAML of the README and the documentation is what it says it is."""

import subprocess

import pytest
import yaml
from ballast_operator.api.read import read_cluster_policy, read_training_job

from tests.docs.blocks import Block, blocks

READERS = {"TrainingJob": read_training_job, "ClusterPolicy": read_cluster_policy}
YAML = blocks("yaml")


def whole(value):
    """A fragment of an object's spec as a whole object; anything else as it is."""
    if set(value or ()) == {"spec"}:
        spec = {
            "totalSteps": 1,
            "checkpoint": {"path": "/c"},
            "template": {"spec": {"containers": [{"name": "t"}]}},
        }
        each = value["spec"].get("plan", {}).get("layers")
        if each is None:
            each = [layer["repeat"] for layer in value["spec"]["planner"]["profiles"][0]["layers"]]
        spec |= {"model": {"name": "gpt", "layers": sum(each)}, **value["spec"]}
        return {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "patched"},
            "spec": spec,
        }
    if value and set(value) <= {"objective", "tenants"}:
        pool = {"name": "a", "gpuType": "v100", "nodeSelector": {"pool": "a"}}
        return {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "ClusterPolicy",
            "metadata": {"name": "default"},
            "spec": {**value, "nodePools": [pool]},
        }
    return value


def objects():
    return [(b.where, whole(yaml.safe_load(b.text))) for b in YAML]


OBJECTS = [(where, value) for where, value in objects() if value.get("kind") in READERS]


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.where)
def test_each_block_is_read_by_the_program_that_it_is_for(block: Block):
    """Objects by the operator; what has no kind is input of a command, which test_commands runs."""
    value = whole(yaml.safe_load(block.text))
    if "kind" in value:
        READERS[value["kind"]](value)
    else:
        # Trainer configurations, profiles and clusters of `ballast plan`.
        assert {"totalSteps", "layers", "gpus"} & set(value), f"{block.where}: no program reads this block"


@pytest.mark.api
def test_a_real_api_server_accepts_every_object(control_plane, namespace):
    """The objects of the pages, by a dry run of the server; tests/operator/api has those of examples/."""
    program = control_plane.cluster.kubectl if control_plane.cluster else "kubectl"
    kubectl = [str(program), "--kubeconfig", str(control_plane.kubeconfig), "apply", "--dry-run=server"]
    done = subprocess.run(
        [*kubectl, "--namespace", namespace, "-f", "-"],
        input=yaml.safe_dump_all(value for _, value in OBJECTS),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(OBJECTS)
