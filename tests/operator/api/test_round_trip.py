"""Objects survive the way through the models, whatever their values."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ballast_operator.api.read import InvalidObject, read_cluster_policy, read_training_job
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.examples import EXAMPLES, at_default
from tests.fuzz import seeds

PLAIN = {field: seeds.JOB["spec"][field] for field in ("model", "pipeline", "checkpoint", "template")}
LAYERS = [{"forwardSeconds": 0.1, "backwardSeconds": 0.2, "repeat": 8}]
JOBS: list[dict[str, Any]] = [
    {
        **seeds.JOB["spec"],
        "template": seeds.TEMPLATE,
        "topology": {"preferred": "rack"},
        "mixedPools": "Never",
        "planner": {
            "profiles": [{"tensor": 2, "microbatchSize": 4, "layers": LAYERS}],
            "gpus": [{"gpuType": "v100", "speed": 2.5, "memory": "16Gi"}],
            "bandwidth": 1e9,
        },
        "repack": {"enabled": False},
    },
    {
        **seeds.JOB["spec"],
        **EXAMPLES["config"].to_dict(),
        "mixedPools": "Never",
        "sharesGpu": "Allowed",
        "suspend": True,
        "backoffLimit": 5,
        "user": "ann",
        "activeDeadlineSeconds": 3600,
        "topology": {"required": "rack"},
        "managedBy": "ballast.dev/operator",
        "failurePolicy": {"failOn": [42], "ignore": [43, 44]},
    },
    {
        **PLAIN,
        "totalSteps": 9,
        "mixedPools": "Allowed",
        "pipeline": {**PLAIN["pipeline"], "minStages": 4},
        "plan": {"layers": [1, 2, 2, 3], "gpus": [{"gpuType": "v100", "stages": 4}]},
        "repack": {"enabled": False},
        "training": {"rateFactor": "my_rates:factor"},
        "data": {"name": "my.data:windows", "collate": "my.data:padded"},
        "dataLocation": {"region": "us-east-1", "readInAll": "1.5Gi"},
    },
    {
        **PLAIN,
        "totalSteps": 9,
        "pipeline": {**PLAIN["pipeline"], "minStages": 2, "maxStages": 2, "replicas": [2, 1]},
        "evaluation": {
            "everySteps": 5,
            "batches": 2,
            "data": {"name": "my.data:w", "packing": True, "shiftLabels": True, "padToMultipleOf": 8},
        },
    },
]
"""Specs that state each field at another value than its default, in one of them: some exclude each other."""

POLICIES: list[dict[str, Any]] = [
    {
        **seeds.POLICY["spec"],
        "objective": {**seeds.POLICY["spec"]["objective"], "heterogeneityAgnostic": True},
        "tenants": {
            "eachNamespace": {
                "maxGpus": 8,
                "maxGpusByType": {"v100": 4},
                "maxRunningJobs": 3,
                "maxWaitingJobs": 9,
            },
            "namespaces": {"vip": {"maxWaitingJobs": 5}},
        },
        "spot": {"onDemandShare": 0.25, "mostInOnePool": 0.5},
        "topology": {"levels": [{"nodeLabel": "example.com/rack"}]},
        "nodeHealth": {
            "unhealthyConditions": ["GpuMemWatch", "Own=False"],
            "failedJobs": 3,
            "withinSeconds": 60.5,
            "avoidSeconds": 0.5,
        },
        "dryRun": True,
    }
]


@pytest.mark.parametrize(("read", "specs"), [(read_training_job, JOBS), (read_cluster_policy, POLICIES)])
def test_every_field_is_stated_by_some_example(read: Callable[[Any], Any], specs: list[Any]) -> None:
    """A new field that they leave at its default would not be seen to come back."""
    missing = set.intersection(*(set(at_default(read(item(spec)).spec)) for spec in specs))
    assert {path for path in missing if not path.startswith("template.")} == set()


def item(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "full"}, "spec": spec}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every number and text inside."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list):
            yield from places(inner)
        else:
            yield value, key


def drawn_again(value: Any) -> st.SearchStrategy[Any]:
    """Another value of its kind, often one that the field takes."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(0, 2 * value + 1)
    if isinstance(value, float):
        return st.floats(0, 2 * value + 1)
    return st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


def holds(found: Any, stated: Any) -> bool:
    """Whether all that is stated is there, unchanged; defaults may stand beside it."""
    if isinstance(stated, dict):
        return isinstance(found, dict) and all(
            key in found and holds(found[key], value) for key, value in stated.items()
        )
    if isinstance(stated, list):
        return len(found) == len(stated) and all(map(holds, found, stated))
    return bool(found == stated)


@pytest.mark.slow
@pytest.mark.parametrize(("read", "specs"), [(read_training_job, JOBS), (read_cluster_policy, POLICIES)])
def test_an_object_with_every_field_comes_back_unchanged(
    read: Callable[[Any], Any], specs: list[Any]
) -> None:
    """No field is lost, renamed or rounded: as stated, and with a few values drawn again."""
    for spec in specs:
        back = read(item(spec)).spec.to_dict()
        assert holds(back, spec)
        assert read(item(back)).spec.to_dict() == back

    @given(st.data())
    def comes_back(data: st.DataObject) -> None:
        spec = copy.deepcopy(data.draw(st.sampled_from(specs)))
        for where, key in data.draw(st.lists(st.sampled_from(list(places(spec))), max_size=4)):
            where[key] = data.draw(drawn_again(where[key]))
        try:
            back = read(item(spec)).spec.to_dict()
        except InvalidObject:
            return
        assert holds(back, spec)
        assert read(item(back)).spec.to_dict() == back

    comes_back()
