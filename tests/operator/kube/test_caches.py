"""Caches fed by overlapping sources keep the newest and forget the gone, and of an object what is read."""

from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kept_fields import pinned_node, prune_fields
from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_operator.views.nodes import pod_gpus, read_node
from ballast_operator.views.pod import read_pod
from ballast_policies.contract.messages import JOB_LABEL


def pod(name: str, version: int, uid: str = "u", job: str | None = None) -> dict:
    labels = {JOB_LABEL: job} if job else {}
    metadata = {"namespace": "n", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


def test_an_old_event_cannot_undo_an_own_write():
    """The answer to a write is newer than the event that the watch delivers late."""
    caches = Caches()
    caches.wrote(POD, pod("a", 7))
    caches.watched(POD, "MODIFIED", pod("a", 6))
    assert caches[POD].get(("n", "a"))["metadata"]["resourceVersion"] == "7"


def test_a_deleted_object_does_not_come_back_with_a_late_answer():
    """The answer to the delete call arrives after the watch's DELETED."""
    caches = Caches()
    caches.watched(POD, "ADDED", pod("a", 1))
    caches.watched(POD, "DELETED", pod("a", 3))
    caches.wrote(POD, pod("a", 2))
    assert caches[POD].get(("n", "a")) is None


def test_a_new_object_of_the_same_name_replaces_the_gone_one():
    """Deleted and made again: the deletion of the old one does not touch the new one."""
    caches = Caches()
    caches.watched(POD, "ADDED", pod("a", 1, uid="old"))
    caches.wrote(POD, pod("a", 5, uid="new"))
    caches.watched(POD, "DELETED", pod("a", 3, uid="old"))
    assert caches[POD].get(("n", "a"))["metadata"]["uid"] == "new"


def test_a_list_finds_what_the_watch_lost():
    """Missed additions come in, missed deletions go out, newer objects than the list stay, listeners hear."""
    caches = Caches()
    told = []
    caches.listeners.append(lambda kind, item: told.append(item["metadata"]["name"]))
    caches.wrote(POD, pod("gone", 2, uid="g"))
    caches.wrote(POD, pod("fresh", 12, uid="f"))
    caches.listed(POD, [pod("gone", 2, uid="g")], 2)
    assert POD not in caches.lagging_since, "a watch begins with the first list"
    missed = caches.listed(POD, [pod("there", 5, uid="t")], 10)
    assert missed == 2
    assert sorted(told) == ["gone", "there"]
    assert sorted(item["metadata"]["name"] for item in caches[POD]) == ["fresh", "there"]
    assert POD in caches.lagging_since
    caches.watched(POD, "ADDED", pod("more", 13, uid="m"))
    assert POD not in caches.lagging_since
    caches.watched(POD, "MODIFIED", pod("gone", 9, uid="g"))
    assert caches[POD].get(("n", "gone")) is None, "an event from before the list brought it back"


def test_a_list_as_new_as_what_it_contradicts_is_believed_at_once():
    """Only an older one may come from a replica that lags behind."""
    caches, item = Caches(), pod("a", 2)
    caches.watched(POD, "ADDED", item)
    caches.watched(POD, "DELETED", item)
    told = []
    caches.listeners.append(lambda kind, item: told.append(item["metadata"]["name"]))
    assert caches.doubt(POD, caches[POD].known(), [item], 2)
    assert told == ["a"]
    caches.listed(POD, [item], 2)
    assert caches[POD].get(("n", "a")) is not None
    assert not caches.doubt(POD, caches[POD].known(), [item], 2), "it agrees with what is known"
    assert caches.past == 1 and caches.set_back.is_set()


def test_pods_are_found_by_job_and_a_changed_label_moves_them():
    caches = Caches()
    caches.watched(POD, "ADDED", pod("a", 1, job="one"))
    assert [p["metadata"]["name"] for p in caches[POD].of_job(("n", "one"))] == ["a"]
    caches.watched(POD, "MODIFIED", pod("a", 2, job="two"))
    assert caches[POD].of_job(("n", "one")) == []
    assert [p["metadata"]["name"] for p in caches[POD].of_job(("n", "two"))] == ["a"]


def test_a_label_alone_makes_nothing_a_jobs():
    """A pod of somebody else counts as foreign, whatever labels it carries: its GPUs are taken."""
    caches = Caches()
    caches.watched(POD, "ADDED", pod("borrowed", 1, uid="x", job="j"))
    owned = pod("own", 2, uid="y", job="j")
    owned["metadata"]["ownerReferences"] = [{"kind": "TrainingJob", "name": "j", "controller": True}]
    caches.watched(POD, "ADDED", owned)
    assert [item["metadata"]["name"] for item in caches[POD].of_no_job()] == ["borrowed"]


POD_ITEM = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "j-1-0",
        "namespace": "n",
        "uid": "u",
        "resourceVersion": "5",
        "labels": {"ballast.dev/job": "j", "ballast.dev/launch": "1", "ballast.dev/rank": "0"},
        "annotations": {"some": "thing"},
        "managedFields": [{"manager": "x"}],
        "ownerReferences": [{"uid": "o"}],
    },
    "spec": {
        "nodeName": "node",
        "volumes": [{"name": "v"}],
        "containers": [
            {"name": "trainer", "image": "i", "env": [], "resources": {"limits": {"nvidia.com/gpu": "2"}}}
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node"]}]}
                    ]
                }
            }
        },
    },
    "status": {
        "phase": "Failed",
        "podIP": "10.0.0.1",
        "reason": "Evicted",
        "conditions": [{"type": "DisruptionTarget", "status": "True", "lastProbeTime": None}],
        "containerStatuses": [
            {"name": "trainer", "image": "i", "state": {"terminated": {"exitCode": 3, "message": "m"}}}
        ],
    },
}


def test_a_pruned_pod_reads_as_the_whole_one():
    """Whatever a pass looks at is kept."""
    kept = prune_fields(POD, POD_ITEM)
    assert read_pod(kept, node_ready=True) == read_pod(POD_ITEM, node_ready=True)
    assert pod_gpus(kept, "nvidia.com/gpu") == 2
    assert pinned_node(kept) == pinned_node(POD_ITEM) == "node"
    assert kept["metadata"]["ownerReferences"] == [{"uid": "o"}]
    assert "managedFields" not in kept["metadata"] and "volumes" not in kept["spec"]


def test_a_pruned_node_reads_as_the_whole_one():
    """Labels, taints, readiness and what it offers; not its images."""
    item = {
        "metadata": {"name": "a", "labels": {"pool": "x"}, "annotations": {"y": "z"}},
        "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoSchedule"}], "podCIDR": "c"},
        "status": {
            "images": [{"names": ["large"]}],
            "allocatable": {"nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "t"}],
        },
    }
    kept = prune_fields(NODE, item)
    assert read_node(kept) == read_node(item)
    assert "images" not in kept["status"]


def test_equal_strings_are_stored_once():
    """Twenty thousand pods name the same resource."""
    one, other = (
        prune_fields(
            JOB, {"metadata": {"name": "a", "labels": {"k": "".join(["nvi", "dia"])}}, "spec": {"x": 1}}
        )
        for _ in range(2)
    )
    assert one["metadata"]["labels"]["k"] is other["metadata"]["labels"]["k"]


def test_an_object_nested_beyond_reason_is_kept_as_it_is():
    """A template may hold anything; its job answers for it, and the watch continues."""
    nested: dict = {}
    for _ in range(5000):
        nested = {"a": nested}
    item = {"metadata": {"name": "a"}, "spec": nested}
    assert prune_fields(JOB, item) is item
