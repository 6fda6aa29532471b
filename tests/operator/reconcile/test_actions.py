"""In which order a pass's actions are carried out, and which at the same time."""

from ballast_operator.kube.kinds import LEASE, SERVICE_ACCOUNT
from ballast_operator.reconcile.actions import PODS_AT_ONCE, batches
from ballast_operator.steps.context import Apply, CreatePod, DeletePod

ACCOUNT, RIGHT_TO_REPORT = Apply(SERVICE_ACCOUNT, {}), Apply(LEASE, {})


def pods(count: int) -> list[CreatePod]:
    return [CreatePod({"metadata": {"name": f"one-1-{number}"}}) for number in range(count)]


def sizes(actions) -> list[int]:
    return [len(batch) for batch in batches(actions)]


def test_a_gangs_pods_are_created_after_what_they_need_and_after_the_first_of_them() -> None:
    """Where the first is refused, no other is made; the others do not wait for each other."""
    gang = pods(4)
    found = [list(batch) for batch in batches([ACCOUNT, RIGHT_TO_REPORT, *gang])]
    assert found == [[ACCOUNT, RIGHT_TO_REPORT], gang[:1], gang[1:]]


def test_a_large_gang_is_created_in_parts() -> None:
    """So that one job does not take all of the API server's attention."""
    assert sizes(pods(2 + 2 * PODS_AT_ONCE)) == [1, PODS_AT_ONCE, PODS_AT_ONCE, 1]


def test_pods_are_deleted_one_after_the_other() -> None:
    """In the order that was decided."""
    assert sizes([DeletePod("one-1-1", "uid"), DeletePod("one-1-0", "uid")]) == [1, 1]
