"""What asks for a pass or a decision, and in which order the actions of a pass are carried out."""

import asyncio
import copy
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, LEASE, NODE, POD, POLICY, SERVICE_ACCOUNT
from ballast_operator.observation.observer import Observer
from ballast_operator.reconcile.actions import PODS_AT_ONCE, batches
from ballast_operator.reconcile.changes import Changes, KeyQueue, Lane
from ballast_operator.reconcile.reconciler import PROGRESS_WRITES_PER_SECOND
from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import Apply, CreatePod, DeletePod
from ballast_operator.views import clock as clocks
from ballast_operator.views.assignment import Decided
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    FINISHED_ANNOTATION,
    JOB_LABEL,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Ack,
    Proposal,
    Report,
    lease_name,
)
from ballast_policies.protocol.observed import Action
from ballast_policies.scheduling.assignments import Assignment

from tests.operator.loops.simulated.simulation import job as training_job
from tests.operator.loops.simulated.simulation import policy as cluster_policy
from tests.operator.observation.test_gpu_holders import holding
from tests.support.waiting import WAIT_SECONDS, Clock

KEY = ("team", "j")


class Bench:
    """Caches, a queue, and what a watch would bring."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.caches = Caches()
        self.queue = KeyQueue(self.clock)
        observer = Observer(self.caches, clock=clocks.Clock(seconds=self.clock))
        self.observer = observer
        changes = Changes(
            observer,
            self.queue,
            settings=JobSettings(),
            allocate=self._allocate,
            arrived=lambda view: self._allocate(),
        )
        self.changes = changes
        self.decisions = 0
        self.caches.listeners.append(changes.changed)
        self.version = 0

    def _allocate(self) -> None:
        self.decisions += 1

    def brings(self, kind, item, event="MODIFIED"):
        self.version += 1
        item = copy.deepcopy(item)
        metadata = item["metadata"]
        metadata.setdefault("uid", "u")
        metadata.setdefault("generation", 1)
        metadata["resourceVersion"] = str(self.version)
        self.caches.watched(kind, event, item)

    def asked(self) -> tuple[int, int]:
        """(decisions asked for, keys that are due) since the last time."""
        found = self.decisions, self.queue.due()
        self.decisions = 0
        self.queue._plans.clear()
        return found


@pytest.fixture
def bench():
    found = Bench()
    found.brings(JOB, training_job("j"))
    return found


def conditions(**told):
    """Of a status: type -> (True or False, reason)."""
    usual = {"lastTransitionTime": "2026-01-01T00:00:00Z", "message": "so it is"}
    return [
        {**usual, "type": kind, "status": str(value), "reason": reason}
        for kind, (value, reason) in told.items()
    ]


WAITS = conditions(Admitted=(False, JobReason.WAITING_FOR_CAPACITY))
FAILED = conditions(Failed=(True, JobReason.USER_ERROR))


@pytest.mark.parametrize(
    ("spec", "status", "due"),
    [
        ({}, {}, 0),
        ({}, {"conditions": WAITS}, 0),
        ({}, {"conditions": FAILED}, 1),
        ({}, {"conditions": WAITS, "launches": 1}, 1),
        ({"suspend": True}, {}, 1),
    ],
    ids=["new", "told by an earlier operator", "failed", "launched before", "suspended"],
)
async def test_a_job_that_waits_asks_for_a_decision_and_is_looked_at_afterwards(spec, status, due):
    """One pass with the answer; for whom it changes nothing, or who may have a gang, is looked at now."""
    bench = Bench()
    bench.brings(JOB, {**training_job("j", **spec), "status": status})
    assert bench.asked() == (1, due)


@pytest.mark.parametrize("change", [{"generation": 2}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}])
async def test_an_edit_and_a_deletion_ask_for_both(bench, change):
    """A person has changed something."""
    bench.asked()
    item = training_job("j")
    item["metadata"] |= change
    bench.brings(JOB, item)
    assert bench.asked() == (1, 1)


async def test_a_policy_asks_for_a_decision_with_its_spec_and_its_end_alone(bench):
    """Its status is the operator's own writing."""
    bench.asked()
    item = cluster_policy("fast")
    for change, decisions in (({}, 1), ({"status": {"gpus": 2}}, 0), ({"generation": 2}, 1)):
        item["metadata"] |= {key: value for key, value in change.items() if key == "generation"}
        item |= {key: value for key, value in change.items() if key == "status"}
        bench.brings(POLICY, item)
        assert bench.asked() == (decisions, 0), change
    bench.brings(POLICY, item, event="DELETED")
    assert bench.asked() == (1, 0)


async def test_a_status_asks_for_nothing_while_the_pass_that_wrote_it_works(bench):
    """The event of an own write may come before its answer."""
    bench.asked()
    bench.queue.add(KEY)
    await bench.queue.take()
    bench.brings(JOB, {**training_job("j"), "status": {"state": "Waiting"}})
    bench.queue.done(KEY)
    bench.clock.now += 1.0
    assert bench.asked() == (0, 0)


async def test_a_status_that_somebody_else_wrote_is_looked_at(bench):
    """A little later, and no decision is asked for."""
    bench.asked()
    bench.brings(JOB, {**training_job("j"), "status": {"state": "Waiting"}})
    assert bench.decisions == 0
    bench.clock.now += 1.0
    assert bench.queue.due() == 1


def of_the_job(name: str, **metadata):
    owner = {"kind": "TrainingJob", "name": "j", "uid": "u", "controller": True}
    labels = {JOB_LABEL: "j"}
    return {"name": name, "namespace": "team", "labels": labels, "ownerReferences": [owner], **metadata}


def lease(step: int, ack: int = 1, rebalances: int = 0, more: Mapping[str, str] = MappingProxyType({})):
    report = Report(epoch=1, step=step, loss=1.0, steps_per_second=1.0, rebalances=rebalances)
    said = {REPORT_ANNOTATION: report.to_json(), ACK_ANNOTATION: Ack(epoch=ack, step=0).to_json(), **more}
    return {"metadata": of_the_job(lease_name("j"), annotations=said), "spec": {"renewTime": str(step)}}


async def test_reports_of_progress_are_looked_at_a_few_times_a_minute(bench):
    """Thousands of trainers report every second; none of it asks for a decision."""
    bench.brings(LEASE, lease(1))
    bench.asked()
    for step in range(2, 50):
        bench.brings(LEASE, lease(step))
    assert bench.decisions == 0 and bench.queue.due() == 0
    bench.clock.now += JobSettings().progress_seconds
    assert bench.queue.due() == 1


PROPOSAL = Proposal(
    epoch=1,
    step=3,
    kept_pods=("j-1-0",),
    released_pods=("j-1-1",),
    stages=(),
    step_seconds_before=1.0,
    step_seconds_after=1.0,
    reason="fewer will do",
)


@pytest.mark.parametrize(
    "news",
    [
        lease(3, ack=2),
        lease(3, rebalances=1),
        lease(3, more={PROPOSAL_ANNOTATION: PROPOSAL.to_json()}),
        lease(3, more={FINISHED_ANNOTATION: "3"}),
        lease(3, more={PROPOSAL_ANNOTATION: "["}),
    ],
    ids=["an answer", "a rebalance", "a proposal", "the end", "a message that cannot be read"],
)
async def test_what_is_more_than_progress_is_looked_at_at_once(bench, news):
    """What the job's protocol or a person waits for is more than progress."""
    bench.brings(LEASE, lease(2))
    bench.asked()
    bench.brings(LEASE, news)
    assert bench.queue.due() == 1


def pod(**status):
    return {"metadata": of_the_job("j-1-0"), "spec": {"nodeName": "node"}, "status": status}


async def test_a_pod_that_goes_asks_for_a_decision_and_one_that_runs_does_not(bench):
    """Its GPU comes free; that it runs is for its job alone."""
    bench.asked()
    bench.brings(POD, pod(phase="Running"))
    assert bench.asked() == (0, 1)
    leaving = pod(phase="Running")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    bench.brings(POD, leaving)
    assert bench.asked() == (1, 1)


async def test_a_pod_of_others_asks_for_a_decision_with_what_it_holds_of_a_node(bench):
    """It begins, ends, is gone; that it becomes ready, fails its probes or is told to end is no news."""
    bench.asked()
    holds = {"containers": [{"name": "web", "resources": {"requests": {"cpu": "1"}}}]}
    other = {"metadata": {"name": "web", "namespace": "apps"}, "spec": holds, "status": {"phase": "Pending"}}
    told = {"name": "web", "namespace": "apps", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    more = {"containers": [{"name": "web", "resources": {"requests": {"cpu": "2"}}}]}
    for change, decisions in (
        ({}, 0),
        ({"spec": {**holds, "nodeName": "node"}}, 1),
        ({"status": {"phase": "Running"}}, 0),
        ({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}}, 0),
        ({"spec": {**more, "nodeName": "node"}}, 1),
        ({"metadata": told}, 0),
        ({"status": {"phase": "Succeeded"}}, 1),
        ({"status": {"phase": "Running"}}, 1),
    ):
        other |= change
        bench.brings(POD, other)
        assert bench.asked() == (decisions, 0), change
    bench.brings(POD, other, event="DELETED")
    assert bench.asked() == (1, 0)


async def test_a_heartbeat_of_a_node_asks_for_nothing_and_its_loss_for_both(bench):
    """Nodes report often."""
    node = {"metadata": {"name": "node"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    bench.brings(NODE, node)
    bench.brings(POD, pod(phase="Running"))
    bench.asked()
    bench.brings(NODE, node)
    assert bench.asked() == (0, 0)
    node["status"]["conditions"][0]["status"] = "False"
    bench.brings(NODE, node)
    assert bench.asked() == (1, 1)


NOTICE = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}


@pytest.mark.parametrize(("taints", "event"), [([NOTICE], "MODIFIED"), ([], "DELETED")])
async def test_a_notice_and_the_deletion_of_a_node_object_are_urgent(bench, taints, event):
    """Its pods go soon: workers that do nothing else but what is urgent take their job."""
    node = {"metadata": {"name": "node"}, "spec": {}, "status": {}}
    bench.brings(NODE, node)
    bench.brings(POD, pod(phase="Running"))
    bench.asked()
    bench.brings(NODE, {**node, "spec": {"taints": taints}}, event=event)
    async with asyncio.timeout(WAIT_SECONDS):
        assert await bench.queue.take(Lane.URGENT) == KEY


async def test_jobs_whose_words_change_again_and_again_take_turns(bench):
    """One of them is looked at after the other, and each within the time that a write of all takes."""
    bench.asked()
    keys, taken = [("team", str(number)) for number in range(40)], []
    for _ in range(100):
        for key in keys:
            bench.changes.again_in_turn(key)
        bench.clock.now += 1.01 / PROGRESS_WRITES_PER_SECOND
        assert 1 <= bench.queue.due() <= 2
        taken.append(await bench.queue.take())
        bench.queue.done(taken[-1])
    assert set(taken[:40]) == set(keys) and taken[40:80] == taken[:40]


async def test_a_job_that_is_looked_at_before_its_turn_keeps_its_turn(bench):
    """Its words may change once more until then."""
    bench.asked()
    bench.changes.again_in_turn(KEY)
    bench.changes.again(KEY)
    bench.queue.done(await bench.queue.take())
    bench.changes.again_in_turn(KEY)
    assert bench.queue.due() == 0
    bench.clock.now += 2 / PROGRESS_WRITES_PER_SECOND
    assert bench.queue.due() == 1


async def test_what_gpus_wait_for_is_urgent(bench):
    """A job that has its GPUs before it runs; one that only waits is not."""
    assert bench.changes.lane(KEY) is Lane.BACKGROUND
    placed = Assignment(action=Action.PLACE, launches=0)
    bench.observer.decided = Decided(assignments={KEY: placed})
    assert bench.changes.lane(KEY) is Lane.URGENT


@pytest.mark.parametrize(
    ("runs", "ends", "lane"),
    [(False, False, Lane.URGENT), (True, False, Lane.ORDINARY), (True, True, Lane.URGENT)],
    ids=["starts", "trains", "stops"],
)
async def test_a_gang_that_starts_or_stops_is_more_urgent_than_one_that_trains(bench, runs, ends, lane):
    """GPUs stand still meanwhile."""
    status = holding("node").to_dict()
    status["conditions"] = conditions(Running=(runs, JobReason.ALL_RANKS_TRAIN))
    if ends:
        status["allocation"]["ending"] = {"cause": "Preempted", "since": "2026-01-01T00:00:00Z"}
    bench.brings(JOB, {**training_job("j"), "status": status})
    assert bench.changes.lane(KEY) is lane


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
    assert sizes([DeletePod("one-1-1", "uid"), DeletePod("one-1-0", "uid")]) == [1, 1]
