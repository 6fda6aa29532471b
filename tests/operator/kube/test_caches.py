"""Caches fed by overlapping sources keep the newest and forget the gone."""

from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import POD
from ballast_policies.contract import JOB_LABEL


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


def test_pods_are_found_by_job_and_a_changed_label_moves_them():
    """The index follows the label."""
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
