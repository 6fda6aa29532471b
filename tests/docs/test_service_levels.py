"""Pages whose rows and links are checked: service levels, the threat model, the README."""

import importlib.util
import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml
from ballast_operator.api.read import read_cluster_policy, read_training_job

from tests.docs.blocks import Block, blocks

ROOT = Path(__file__).resolve().parents[2]


def page_of(folder, figures):
    specification = importlib.util.spec_from_file_location(
        "service_levels", ROOT / "scripts/service_levels.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    run = {
        "label": "a run",
        "jobs": 10,
        "running": 1,
        "nodes": 2,
        "figures": figures,
        "machine": {"cores": 2, "loadAverageAtStart": [1.0], "loadAverageAtEnd": [2.0]},
    }
    benchmarks = folder / "benchmarks/operator"
    (benchmarks / "emulated").mkdir(parents=True)
    ranges = ROOT / "benchmarks/operator/emulated/ranges.json"
    (benchmarks / "emulated/ranges.json").write_text(ranges.read_text())
    (benchmarks / "scale_recorded.json").write_text(json.dumps([run]))
    return module.service_levels(folder)


def test_a_figure_outside_its_range_is_marked(tmp_path):
    """A reader sees at once what does not hold; what was not measured is not passed over."""
    page = page_of(tmp_path, {"healthzMaxSeconds": 0.1, "failoverSeconds": 99.0})
    rows = {row.split("(`")[1].split("`)")[0]: row for row in page.splitlines() if "(`" in row}
    assert rows["healthzMaxSeconds"].endswith("| at most 0.5 | 0.1 | 0.1 |")
    assert rows["failoverSeconds"].endswith("| 99 | **99** |")
    assert "not measured" in rows["operatorMemoryMiB"]
    assert "10 jobs, 2 nodes, 2 cores, load average 1.0 to 2.0" in page


def test_a_run_without_a_figure_that_has_a_range_does_not_pass():
    """A metric of another name would else be within its range for ever."""
    module = runpy.run_path(str(ROOT / "benchmarks/operator/emulated/ranges.py"))
    rows = {
        row.name: row for row in module["compare"]({"healthzMaxSeconds": 0.1, "other": 1}, module["RANGES"])
    }
    assert (rows["healthzMaxSeconds"].within, rows["other"].within) == (True, None)
    assert rows["failoverSeconds"].within is False
    assert "OUT OF RANGE" in rows["failoverSeconds"].text()


PAGE = ROOT / "docs" / "threat-model.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())


def test_every_test_that_the_page_names_exists():
    """A stop that lost its test would be a promise."""
    assert len(NAMED) > 20
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    assert missing == []


def test_the_readmes_links_lead_somewhere():
    """Every relative link names a file or folder of the repository."""
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


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
