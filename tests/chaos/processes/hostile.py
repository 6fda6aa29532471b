"""What a job's author may hand in to harm others: each has to be refused, or to end at that job."""

import json
from typing import Any

from tests.chaos.processes.jobs import Job, trainer


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def _template(**changes: Any) -> dict[str, Any]:
    spec = {"containers": [trainer()], **changes.pop("spec", {})}
    return {"template": {"spec": spec, **changes}}


def _container(**changes: Any) -> dict[str, Any]:
    return _template(spec={"containers": [{**trainer(), **changes}]})


OWNER = {"apiVersion": "v1", "kind": "Node", "name": "fast-0", "uid": "1", "controller": True}
HOST = {"name": "host", "hostPath": {"path": "/"}}

DEEP, LEVELS = "<nested>", 9_000
"""What stands for objects in objects, more than Python's own decoder can read."""

SPECS: dict[str, dict[str, Any]] = {
    "nesting": {"model": {"name": "gpt", "args": _nested(90)}},
    "deep nesting": {"model": {"name": "gpt", "args": _nested(700)}},
    "very deep nesting": {"model": {"name": "gpt", "args": {"deep": DEEP}}},
    "huge numbers": {"totalSteps": 2**53, "model": {"name": "gpt", "layers": 2**31, "args": {"dim": 10**18}}},
    "a number beyond 64 bits": {"totalSteps": 10**30},
    "not a number": {"weight": float("nan")},
    "many pods": {"pipeline": {"minStages": 100_000, "maxStages": 100_000}},
    "control characters": {"model": {"name": "gpt\u0000\u001b[2J\n", "args": {"\u202e": "\u0007"}}},
    "a model that is no module": {"model": {"name": "os:system", "args": {"command": "true"}}},
    "the host's file system": _template(spec={"volumes": [HOST]}),
    "the host's processes": _template(spec={"hostPID": True, "hostNetwork": True, "hostIPC": True}),
    "another account": _template(spec={"serviceAccountName": "ballast-operator"}),
    "a node by name": _template(spec={"nodeName": "fast-0"}),
    "an owner": _template(metadata={"ownerReferences": [OWNER]}),
    "a finalizer": _template(metadata={"finalizers": ["example.com/never"]}),
    "a name and labels of others": _template(
        metadata={"name": "single-0-1-0", "labels": {"ballast.dev/job": "single-0"}}
    ),
    "env of a wrong type": _container(env=[{"value": 7}]),
    "resources of a wrong type": _container(resources="lots"),
    "a privileged container": _container(securityContext={"privileged": True}),
    "a command that ends": _container(command=["false"]),
    "GPUs in a second container": _template(
        spec={
            "containers": [
                trainer(),
                {**trainer(), "name": "b", "resources": {"limits": {"nvidia.com/gpu": 3}}},
            ]
        }
    ),
    "somebody's checkpoints": {"checkpoint": {"path": "/proc/self/../../etc"}},
}
"""What is wrong -> fields of the spec; the others are a small job's."""

NAMES = (
    "hostile",
    "ballast-operator",
    "single-0-1",
    "h" * 63,
    "a.b",
    "Upper",
    "-x",
    "single-0\n",
    "../leases",
)
"""Names of such jobs: free, the leader's Lease, near another job's, too long, none."""


def manifest(number: int, job: Job) -> tuple[str, str]:
    """The name and the text of the TrainingJob of this number."""
    whole = job.manifest()
    name = NAMES[number // len(SPECS) % len(NAMES)]
    spec = {**whole["spec"], **list(SPECS.values())[number % len(SPECS)]}
    if name == NAMES[0]:
        name = f"{name}-{number}"
    text = json.dumps({**whole, "metadata": {"name": name}, "spec": spec})
    return name, text.replace(f'"{DEEP}"', '{"a":' * LEVELS + "1" + "}" * LEVELS)
