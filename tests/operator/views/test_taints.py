"""Taints and tolerations: matched as kube-scheduler matches them."""

import pytest
from ballast_operator.views.node_constraints import Taint, blocking, tolerates
from ballast_operator.views.nodes import read_node

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
