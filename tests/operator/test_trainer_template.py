"""What an administrator fills in of every job's template, and what a job keeps for itself."""

import copy
import json
import re

import pytest
from ballast_operator.api import template as module
from ballast_operator.api.template import TRAINER_VARIABLE, filled_in, trainer_template
from ballast_operator.cli.operator import operator
from ballast_operator.views.spec import read_spec
from click.testing import CliRunner

TEN_LINES = {
    "apiVersion": "ballast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "small", "namespace": "default"},
    "spec": {
        "totalSteps": 200,
        "model": {"name": "gpt", "layers": 8},
        "pipeline": {"maxStages": 2, "microbatches": 4, "globalBatchSize": 8},
        "checkpoint": {"path": "/checkpoints/small"},
        "template": {"spec": {"containers": [{"name": "trainer"}]}},
    },
}
USUAL = {
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "image": "registry.example.com/ballast/trainer:0.1.0",
                "securityContext": {"readOnlyRootFilesystem": True, "runAsGroup": 5},
                "resources": {"requests": {"cpu": "2", "memory": "4Gi"}},
                "env": [{"name": "BALLAST_METRICS_PORT", "value": "9000"}],
                "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
            }
        ],
        "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}],
        "imagePullSecrets": [{"name": "registry"}],
    }
}


@pytest.fixture
def usual(monkeypatch):
    """The operator with a template to fill in, or with the text that a test gives."""

    def use(text=""):
        monkeypatch.setenv(TRAINER_VARIABLE, text or json.dumps(USUAL))
        trainer_template.cache_clear()

    yield use
    trainer_template.cache_clear()


def test_a_job_of_ten_lines_has_an_image_and_a_volume(usual):
    """Its pods are those of the administrator's template."""
    usual()
    spec, problem = read_spec(TEN_LINES)
    assert problem == ""
    assert spec.template["spec"] == USUAL["spec"]


def test_what_a_job_says_wins():
    """Its image, its requests one by one, its mounts by their path, its variables by their name."""
    own = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "mine:1",
                    "securityContext": {"runAsGroup": 6},
                    "resources": {"requests": {"cpu": "8"}},
                    "env": [{"name": "BALLAST_METRICS_PORT", "value": "1"}, {"name": "A", "value": "b"}],
                    "volumeMounts": [{"name": "nfs", "mountPath": "/checkpoints"}],
                },
                {"name": "sidecar", "image": "other:1"},
            ],
            "volumes": [{"name": "nfs", "nfs": {"server": "s", "path": "/"}}],
        },
    }
    result = filled_in(own, USUAL)
    trainer, sidecar = result["spec"]["containers"]
    assert trainer["image"] == "mine:1"
    assert trainer["name"] == "main"
    assert trainer["securityContext"] == {"readOnlyRootFilesystem": True, "runAsGroup": 6}
    assert trainer["resources"] == {"requests": {"cpu": "8", "memory": "4Gi"}}
    assert trainer["env"] == own["spec"]["containers"][0]["env"]
    assert trainer["volumeMounts"] == own["spec"]["containers"][0]["volumeMounts"]
    # A claim that nothing mounts would keep the pod from starting where there is none.
    assert result["spec"]["volumes"] == own["spec"]["volumes"]
    assert result["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert result["metadata"]["labels"] == {"team": "vision"}
    assert sidecar == own["spec"]["containers"][1]


@pytest.mark.parametrize(
    ("field", "value", "joined"),
    [
        ("resources", {"claims": [{"name": "gpu"}]}, {"requests": {"cpu": "2", "memory": "4Gi"}}),
        ("resources", {"claims": "x"}, {"requests": {"cpu": "2", "memory": "4Gi"}}),
        ("volumeMounts", 5, None),
        ("volumeMounts", ["x"], ["x", *USUAL["spec"]["containers"][0]["volumeMounts"]]),
        ("securityContext", "x", None),
        (
            "env",
            [{"name": "A", "value": "b"}],
            [{"name": "A", "value": "b"}, *USUAL["spec"]["containers"][0]["env"]],
        ),
    ],
)
def test_what_no_schema_checks_is_left_as_it_is(usual, field, value, joined):
    """The API server names what is wrong with it, and a pass over the job goes on."""
    usual()
    job = copy.deepcopy(TEN_LINES)
    job["spec"]["template"]["spec"]["containers"][0][field] = value
    job["spec"]["template"]["spec"]["imagePullSecrets"] = "x"
    spec, problem = read_spec(job)
    assert problem == ""
    found = spec.template["spec"]
    assert found["imagePullSecrets"] == "x"
    wanted = {**value, **joined} if isinstance(value, dict) else joined or value
    assert found["containers"][0][field] == wanted
    job["spec"]["template"]["spec"]["volumes"] = "x"
    assert read_spec(job)[0].template["spec"]["volumes"] == "x"


def test_without_a_template_jobs_are_as_they_are():
    """The usual case: nothing is added."""
    assert filled_in(TEN_LINES["spec"]["template"], {}) == TEN_LINES["spec"]["template"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"spec": {}}',
        '{"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}',
        '{"spec": {"containers": [{"name": "trainer"}], "nodeName": "n"}}',
        "[" * 5000,
    ],
)
def test_an_operator_with_a_template_that_is_none_does_not_start(usual, text):
    """One line that names the variable, before anything is connected to."""
    usual(text)
    done = CliRunner().invoke(operator, [])
    assert done.exit_code == 2
    assert re.search(f"{module.TRAINER_VARIABLE}.*To fix", done.output, re.DOTALL)
