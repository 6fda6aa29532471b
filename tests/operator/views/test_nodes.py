"""Nodes as gangs see them: selectors, taints and notices, and the room that other pods leave."""

import datetime

import pytest
from ballast_operator.allocator.costs.bill import pool_infos
from ballast_operator.views.assignment import MOST_EARLIER
from ballast_operator.views.clock import show
from ballast_operator.views.node_constraints import Taint, blocking, read_requirements, tolerates
from ballast_operator.views.nodes import orphans, pod_requests, read_node
from ballast_policies.contract.messages import JOB_LABEL

from tests.operator.views.builders import a_pool

INIT = {"resources": {"requests": {"cpu": "3"}}}
SIDECAR = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}
MAIN = {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "2", "memory": "1Gi"}}}


@pytest.mark.parametrize(
    ("spec", "cpus"),
    [
        ({"containers": [MAIN, MAIN]}, 1.0),
        ({"containers": [MAIN], "initContainers": [INIT]}, 3.0),
        ({"containers": [MAIN], "initContainers": [SIDECAR, INIT]}, 4.0),
        ({"containers": [MAIN], "initContainers": [SIDECAR]}, 1.5),
        ({"containers": [MAIN], "resources": {"requests": {"cpu": "6"}}}, 6.0),
        ({"containers": [MAIN], "overhead": {"cpu": "250m"}}, 0.75),
        ({"containers": [{"resources": {"requests": {"cpu": "NaN"}}}]}, 0.0),
        ({"containers": [{}]}, None),
    ],
)
def test_a_pods_requests_are_those_that_kube_scheduler_counts(spec, cpus):
    """Init containers one by one, sidecars all along, the pod's own before its containers', with overhead."""
    found = pod_requests(spec)
    assert found.get("cpu") == cpus
    assert found["pods"] == 1.0


def test_a_node_has_room_for_what_pods_of_others_leave():
    """Limits count without requests; pods that have ended or are not bound do not, nor a node's lies."""
    offered = {"cpu": "8", "memory": "2Gi", "pods": "3", "nvidia.com/gpu": "-1", "x/y": "many"}
    item = {"metadata": {"name": "n"}, "status": {"allocatable": offered}}
    pods = [
        {
            "metadata": {"name": str(number)},
            "spec": {"nodeName": node, "containers": [MAIN]},
            "status": {"phase": phase},
        }
        for number, (node, phase) in enumerate(
            [("n", "Running"), ("n", "Pending"), ("n", "Failed"), ("", "Pending")]
        )
    ]
    assert read_node(item, pods).room == {"cpu": 7.0, "memory": 0.0, "pods": 1.0}


SEEN = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
ENDS, OURS = "karpenter.sh/nodeclaim-termination-timestamp", "ballast.dev/leaves-at"


def lasts(labels, **annotations):
    """Seconds from the moment when the notice is first seen; annotations: seconds from then."""
    stated = {
        {"ends": ENDS, "ours": OURS}[name]: show(SEEN + datetime.timedelta(seconds=seconds))
        for name, seconds in annotations.items()
    }
    found = read_node(
        {
            "metadata": {"name": "a", "labels": labels, "annotations": stated},
            "spec": {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]},
        }
    )
    return (found.leaving.goes_at(SEEN) - SEEN).total_seconds()


@pytest.mark.parametrize(
    ("capacity", "stated", "seconds"),
    [
        ("spot", {}, 120),
        ("spot", {"ends": 3600}, 120),
        ("spot", {"ends": 40}, 40),
        ("spot", {"ends": 40, "ours": 600}, 600),
        ("on-demand", {}, 120),
        ("on-demand", {"ends": 3600}, 3600),
        ("on-demand", {"ends": 3600, "ours": 600}, 600),
    ],
)
def test_karpenters_limit_of_a_drain_is_no_promise_of_the_cloud_that_takes_a_spot_machine_back(
    capacity, stated, seconds
):
    """It comes from the NodePool's terminationGracePeriod; the cloud waits two minutes all the same."""
    assert lasts({"karpenter.sh/capacity-type": capacity}, **stated) == seconds


def test_a_node_of_no_known_kind_goes_when_karpenter_says():
    assert lasts({}, ends=3600) == 3600


def template(*terms: dict, selector: dict | None = None) -> dict:
    required = {"nodeSelectorTerms": list(terms)}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {"spec": {**({"affinity": affinity} if terms else {}), "nodeSelector": selector}}


def label(key: str, operator: str, *values: str) -> dict:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def name(operator: str, *values: str) -> dict:
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": list(values)}]}


LABELS = {"zone": "a", "disk": "ssd", "cores": "64"}

CASES = {
    "nothing is asked": (template(), True),
    "a label": (template(selector={"zone": "a", "disk": "ssd"}), True),
    "another value": (template(selector={"zone": "b"}), False),
    "no such label": (template(selector={"rack": "1"}), False),
    "in": (template(label("zone", "In", "a", "b")), True),
    "not in": (template(label("zone", "NotIn", "a")), False),
    "not in, no label": (template(label("rack", "NotIn", "1")), True),
    "exists": (template(label("disk", "Exists")), True),
    "does not exist": (template(label("disk", "DoesNotExist")), False),
    "greater": (template(label("cores", "Gt", "32")), True),
    "not greater": (template(label("cores", "Gt", "64")), False),
    "less than text": (template(label("zone", "Lt", "9")), False),
    "an unknown operator": (template(label("zone", "Like", "a")), False),
    "by name": (template(name("In", "n1")), True),
    "by another name": (template(name("NotIn", "n1")), False),
    "one of two terms": (template(label("zone", "In", "b"), name("In", "n1")), True),
    "both of a term": (template({**label("zone", "In", "a"), **name("In", "n2")}), False),
    "an empty term": (template({}), False),
    "selector and term": (template(label("zone", "In", "a"), selector={"disk": "hdd"}), False),
}


@pytest.mark.parametrize(("asked", "want"), CASES.values(), ids=CASES.keys())
def test_a_node_is_allowed_as_kube_scheduler_allows_it(asked, want):
    """Terms are alternatives, what stands in a term holds together, and the selector holds besides."""
    assert read_requirements(asked).allow("n1", LABELS) is want


TAINT = Taint(key="team", value="vision", effect="NoSchedule")


@pytest.mark.parametrize(
    ("toleration", "matches"),
    [
        ({"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "vision"}, True),
        ({"key": "team", "operator": "", "value": "vision"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "team", "value": "speech"}, False),
        ({"key": "team"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "team", "operator": "Near", "value": "vision"}, False),
    ],
)
def test_a_toleration_matches_taints_as_kubernetes_defines_it(toleration, matches):
    """Operator Exists or Equal; an empty key, effect or operator; a value."""
    assert tolerates([toleration], TAINT) is matches
    assert tolerates([{"key": "x", "operator": "Exists"}, toleration], TAINT) is matches


def test_only_effects_that_keep_pods_away_block():
    """PreferNoSchedule is a preference."""
    taints = [Taint(key="a", effect=effect) for effect in ("NoSchedule", "NoExecute", "PreferNoSchedule")]
    assert [taint.effect for taint in blocking(taints, (), "nvidia.com/gpu")] == ["NoSchedule", "NoExecute"]


def test_the_resource_that_a_pod_asks_for_is_tolerated_as_a_key():
    """As the admission plugin ExtendedResourceToleration adds it."""
    taint = Taint(key="nvidia.com/gpu", value="present", effect="NoSchedule")
    assert blocking([taint], (), "nvidia.com/gpu") == ()
    assert blocking([taint], (), "amd.com/gpu") == (taint,)


@pytest.mark.parametrize(
    "key",
    [
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "node.kubernetes.io/out-of-service",
        "node.cloudprovider.kubernetes.io/shutdown",
    ],
)
def test_a_node_that_is_about_to_go_takes_no_pods(key):
    """Whatever a template tolerates, whatever the effect: the node says why."""
    item = {
        "metadata": {"name": "n"},
        "spec": {"taints": [{"key": key, "effect": "PreferNoSchedule"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert f", by taint {key}:PreferNoSchedule" in read_node(item).closed


@pytest.mark.parametrize(
    ("ready", "unschedulable", "closed"),
    [("True", False, ""), ("True", True, "cordoned"), ("Unknown", False, "not ready")],
)
def test_a_node_that_is_cordoned_or_not_ready_says_so(ready, unschedulable, closed):
    """The text stands in explanations."""
    item = {
        "metadata": {"name": "n"},
        "spec": {"unschedulable": unschedulable},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }
    assert read_node(item).closed == closed


def test_orphans_are_pods_of_no_job_that_hold_gpus():
    """Bound ones that have not ended, with a job's label that nothing controls them by."""
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    owner = {"kind": "TrainingJob", "apiVersion": "ballast.dev/v1alpha1", "name": "one", "controller": True}
    pods = [
        {
            "metadata": {
                "namespace": "a",
                "name": name,
                "labels": {JOB_LABEL: "one"},
                "ownerReferences": owners,
            },
            "spec": {"nodeName": node, "containers": [container]},
            "status": {"phase": phase},
        }
        for name, owners, node, container, phase in (
            ("left", [], "n", gpu, "Running"),
            ("kept", [owner], "n", gpu, "Running"),
            ("ended", [], "n", gpu, "Succeeded"),
            ("waits", [], "", gpu, "Pending"),
            ("small", [], "n", MAIN, "Running"),
        )
    ]
    assert orphans(pods, ["nvidia.com/gpu"]) == ["a/left"]


START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


def test_the_mean_price_is_over_the_time_that_each_price_held():
    """Before, between and after changes; no time at all costs the price of now."""
    pool = a_pool(1.0).changed(a_pool(4.0).pool, at=at(60)).changed(a_pool(2.0).pool, at=at(90))
    assert pool.mean_price(at(0), at(120)) == pytest.approx((60 * 1 + 30 * 4 + 30 * 2) / 120)
    assert pool.mean_price(at(0), at(30)) == pytest.approx(1.0)
    assert pool.mean_price(at(30), at(75)) == pytest.approx((30 * 1 + 15 * 4) / 45)
    assert pool.mean_price(at(70), at(100)) == pytest.approx((20 * 4 + 10 * 2) / 30)
    assert pool.mean_price(at(100), at(200)) == 2.0
    assert pool.mean_price(at(100), at(100)) == pool.mean_price(None, at(0)) == 2.0


def test_prices_that_changed_long_ago_are_given_up():
    """However often a price changes, a pool stays small."""
    pool = a_pool()
    for second in range(1000):
        pool = pool.changed(a_pool(float(second % 7)).pool, at=at(second))
    assert len(pool.earlier) == MOST_EARLIER


def test_a_pool_that_a_new_operator_sees_first_has_cost_what_the_bill_says():
    """The new price counts from now on."""
    listed = a_pool(3.0).pool
    status = {"bill": [{"pool": "p", "pricePerGpuHour": 1.0}]}
    (pool,) = pool_infos([listed], {}, status, at=at(60)).values()
    assert pool.mean_price(at(0), at(120)) == pytest.approx(2.0)
    (pool,) = pool_infos([listed], {}, None, at=at(60)).values()
    assert pool.mean_price(at(0), at(120)) == pytest.approx(3.0)
