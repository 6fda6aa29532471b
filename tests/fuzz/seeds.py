"""Valid inputs from which hostile ones are made."""

import json
from typing import Any

from tests.contract.examples import EXAMPLES
from tests.operator.api import objects

AT = "2026-01-01T12:00:00Z"

JOB = objects.JOB

POLICY: dict[str, Any] = {
    **objects.POLICY,
    "spec": {
        **objects.POLICY["spec"],
        "objective": {"policy": "hierarchical", "entities": {"a": {"weight": 2}, "b": {"parent": "a"}}},
        "roundSeconds": 60,
        "moves": {"minRunSeconds": 30, "maxMovesPerHour": 3},
        "solver": {"timeLimitSeconds": 2},
        "tenants": {"eachNamespace": {"maxGpus": 8}, "namespaces": {"vip": {"maxWaitingJobs": 5}}},
        "dryRun": False,
    },
}

STATUS: dict[str, Any] = {
    "observedGeneration": 3,
    "state": "Running",
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "reason": "AllRanksTrain",
            "message": "2 ranks",
            "lastTransitionTime": AT,
            "observedGeneration": 3,
        }
    ],
    "allocation": {
        "gpuType": "v100",
        "pool": "fast",
        "gpus": 2,
        "pods": ["a-1-0", "a-1-1"],
        "nodes": ["n", "n"],
        "planId": "p",
        "launch": 1,
        "since": AT,
        "joining": ["a-1-1"],
        "joiningSince": AT,
        "firstNewcomer": 1,
        "ending": {"cause": "Preempted", "message": "why", "since": AT},
    },
    "progress": {"step": 10, "percent": 10, "stepsPerSecond": 2.5, "loss": 0.1, "eta": AT, "bubble": 0.1},
    "rebalances": [{"time": AT, "step": 5, "imbalanceBefore": 1.2, "imbalanceAfter": 1.0, "pauseMs": 3.5}],
    "repacks": [
        {
            "time": AT,
            "epoch": 2,
            "step": 7,
            "releasedPods": ["a-1-1"],
            "survivors": [{"name": "a-1-0", "uid": "u"}],
            "pauseMs": 1.5,
            "reason": "fits",
        }
    ],
    "launches": 1,
    "restarts": {"PodLost": 1},
    "lastDecision": {"chosen": "2 x v100", "nextBest": "", "why": "", "planId": "p", "gpuType": "v100"},
    "costSoFar": 1.5,
    "costAt": AT,
    "isolated": {"seconds": 3.5, "step": 4},
    "suspendedSeconds": 0.5,
    "nextLaunchAt": AT,
}

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "image": "trainer:1",
                "command": ["train"],
                "args": ["--x"],
                "env": [
                    {"name": "A", "value": "b"},
                    {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "1Gi"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 1000},
                "terminationMessagePath": "/dev/termination-log",
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            },
            {"name": "logs", "image": "logs:1"},
        ],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "securityContext": {"fsGroup": 2000},
        "terminationGracePeriodSeconds": 30,
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "z", "operator": "In", "values": ["x"]}]}
                    ]
                }
            }
        },
        "volumes": [{"name": "v", "emptyDir": {}}],
    },
}

ANNOTATIONS: dict[str, Any] = {
    **{f"ballast.dev/{name}": json.loads(EXAMPLES[name].to_json()) for name in ("report", "proposal", "ack")},
    "ballast.dev/finished-step": 10,
    "ballast.dev/end-reason": "the loss is low enough",
}

PROFILE: dict[str, Any] = {
    "microbatchSize": 2,
    "layers": [
        {"name": "a", "forwardSeconds": 0.1, "backwardSeconds": 0.2, "heldBytes": 100, "weightBytes": 10},
        {"repeat": 3, "forwardSeconds": 0.1, "backwardSeconds": 0.2, "activationBytes": 5, "outputBytes": 1},
    ],
}

CLUSTER: dict[str, Any] = {
    "gpus": [{"type": "v100", "count": 4, "speed": 2.0, "memoryBytes": 1e10}, {"type": "k80", "count": 4}],
    "gpusPerServer": 4,
    "bandwidth": {"insideServer": 1e9, "betweenServers": 1e8},
}

PROBLEM: dict[str, Any] = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 2, "k80": 4},
    "prices": {"v100": 2.0, "k80": 0.5},
    "entities": {"team": {"weight": 2.0, "policy": "fifo"}},
    "jobs": [
        {"name": "a", "throughput": {"v100": 4.0, "k80": 1.0}, "gpus": 2, "weight": 2.0, "entity": "team"},
        {"name": "b", "throughput": {"v100": 1.0}, "steps_remaining": 100.0, "deadline": 50.0},
    ],
    "pairs": [],
}

TRACE = [
    ["ResNet-18 (batch size 32)", "train.py", "image", "-n", "1", "3948", "2", "1", "-1.0", "0"],
    ["Transformer (batch size 64)", "train.py", "text", "-n", "1", "346", "1", "1", "1.5", "10.5"],
]

AWS_PRICES: dict[str, Any] = {
    "NextToken": "",
    "SpotPriceHistory": [
        {
            "AvailabilityZone": "us-east-1d",
            "InstanceType": "p2.xlarge",
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": "0.3405",
            "Timestamp": "2020-02-20T23:21:08.000Z",
        }
    ],
}

AZURE_PRICES = [["Date", "NC6", "NC6s v3"], ["2/24/2020", "$0.12276", "$0.60313"], ["2/25/2020", "", "$0.6"]]

GCP_PRICES = [
    ["Zone: us-west1-b", "GPU type: nvidia-tesla-k80", "Number of GPUs: 1", "Price per hour: $0.155"],
]

AVAILABILITY = [
    [
        "[2020-03-15T10:07:33Z]",
        "Created instance",
        "i-0",
        "with 1 GPU(s) of type",
        "v100",
        "in zone us-east-1b",
    ],
    ["[2020-03-15T11:07:33Z]", "Instance", "i-0", "running in zone us-east-1b"],
    ["[2020-03-15T12:07:33Z]", "Instance", "i-0", "not running in zone us-east-1b"],
    ["[2020-03-15T12:08:33Z]", "Successfully deleted instance", "i-0"],
    ["[2020-03-15T12:09:33Z]", "Instance with 1 GPU(s) of type v100 creation failed"],
]

INSTANCES = [
    ["cloud", "instance", "gpu_type", "gpus", "on_demand_usd_per_hour"],
    ["aws", "p2.xlarge", "k80", "1", "0.90"],
]

GAVEL: dict[str, Any] = {
    "v100": {"('A3C', 1)": {"null": 2.5, "('A3C', 1)": [1.5, 1.5]}, "('ResNet-18', 2)": {"null": 4}},
    "k80": {"('A3C', 1)": {"null": 0.5}},
    "v100_unconsolidated": {"('ResNet-18', 2)": {"null": 3}},
}

SAVED_STATE: dict[str, Any] = {
    "version": 1,
    "memory": {
        "at": 100.5,
        "moves": [1.0, 2.0],
        "gpuTypes": {"v100@2": "v100"},
        "jobs": {"team/a": [[0, 10.5, 1, 3.0], [0, 9.0], [0, 0.5, 1, 0.5]]},
    },
    "jobs": {"team/a": [1, 10, [[0, 2, 5.5, 0.1, 2, 3]]]},
    "kinds": {"kind": [[1, 2, 5.5, 0.1, 2, 3]]},
    "names": ["v100", "k80", "reports"],
}

NODE: dict[str, Any] = {
    "metadata": {"name": "n", "labels": {"pool": "fast"}},
    "spec": {
        "unschedulable": False,
        "taints": [{"key": "team", "value": "vision", "effect": "NoSchedule", "timeAdded": AT}],
    },
    "status": {
        "allocatable": {"nvidia.com/gpu": "4", "cpu": "8"},
        "capacity": {"nvidia.com/gpu": "4"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "r", "message": "m"}],
    },
}

POD: dict[str, Any] = {
    "metadata": {
        "name": "a-1-0",
        "namespace": "team",
        "uid": "u",
        "labels": {"ballast.dev/job": "a", "ballast.dev/launch": "1", "ballast.dev/rank": "0"},
        "deletionTimestamp": AT,
    },
    "spec": {
        "nodeName": "n",
        "containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    },
    "status": {
        "phase": "Failed",
        "podIP": "10.0.0.1",
        "reason": "Evicted",
        "message": "m",
        "conditions": [{"type": "DisruptionTarget", "status": "True"}],
        "containerStatuses": [
            {
                "name": "trainer",
                "state": {
                    "terminated": {
                        "exitCode": 1,
                        "reason": "Error",
                        "message": EXAMPLES["termination_message"].to_json(),
                    }
                },
            }
        ],
    },
}
