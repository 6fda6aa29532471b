"""Shared memory of pods with several ranks, and GPUs that a template may not ask for."""

import pytest
from ballast_operator.desired.pod import VOLUME, gpus_elsewhere, with_shared_memory

GPU = "nvidia.com/gpu"


def test_shared_memory_grows_with_the_ranks():
    """A volume in memory with a limit, mounted where NCCL looks for it."""
    content = {}
    container = with_shared_memory(content, {"name": "trainer"}, 4)
    assert content["volumes"] == [{"name": VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "4096Mi"}}]
    assert container["volumeMounts"] == [{"name": VOLUME, "mountPath": "/dev/shm"}]


@pytest.mark.parametrize(
    ("content", "container"),
    [
        ({}, {"volumeMounts": [{"name": "mine", "mountPath": "/dev/shm/"}]}),
        ({"volumes": [{"name": VOLUME, "emptyDir": {}}]}, {}),
    ],
    ids=["mounted", "named"],
)
def test_a_users_own_shared_memory_stays(content, container):
    """Neither mount nor volume is added."""
    before = {**content}
    assert with_shared_memory(content, container, 2) is container
    assert content == before


def template(**parts):
    return {"spec": {"containers": [{"name": "trainer"}, {"name": "log"}], **parts}}


def asking(count, part="limits"):
    return {"resources": {part: {GPU: count}}}


@pytest.mark.parametrize(
    ("given", "gpus_per_pod"),
    [
        (template(), 1),
        (template(containers=[asking("1"), {}]), 1),
        (template(containers=[asking(4)]), 4),
        (template(containers=[asking(0), asking("0")]), 2),
        ({}, 1),
    ],
)
def test_gpus_of_the_ranks_or_none_may_be_stated(given, gpus_per_pod):
    """In the first container, as the operator would set it."""
    assert gpus_elsewhere(given, (GPU,), gpus_per_pod) == ""


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (template(containers=[asking("2")]), "containers[0].resources.limits"),
        (template(containers=[{}, asking(1)]), "containers[1].resources.limits"),
        (template(initContainers=[asking(1, "requests")]), "initContainers[0].resources.requests"),
    ],
)
def test_other_gpus_are_refused_with_the_field(given, field):
    """They would be held beside those that the allocator gave, without a rank that uses them."""
    assert f"{field}[{GPU}]" in gpus_elsewhere(given, (GPU,))
