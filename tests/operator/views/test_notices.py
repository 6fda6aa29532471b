"""When a node that has a notice goes, by what its handler, its cloud and its autoscaler say of it."""

import datetime

import pytest
from ballast_operator.views.clock import show
from ballast_operator.views.nodes import read_node

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
    """It is not taken back before."""
    assert lasts({}, ends=3600) == 3600
