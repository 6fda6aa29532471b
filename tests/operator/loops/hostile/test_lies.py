"""Trainers that lie and users that meddle: the job says so, and all others are served."""

import dataclasses
import json
from typing import Any

import pytest
from ballast_operator.errors import Fenced, NotAllowed, Rejected
from ballast_operator.kube.kinds import CONFIG_MAP, EVENT, JOB, LEASE, POD, Kind
from ballast_operator.reconcile.changes import ReconcileWorker
from ballast_operator.views.clock import Time
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    END_REASON_ANNOTATION,
    FINISHED_ANNOTATION,
    PLAN_KEY,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    ExitReason,
    Report,
    TerminationMessage,
    plan_config_map_name,
)

from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.machines import Trainer, end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, job
from tests.operator.loops.simulated.world import World
from tests.operator.views.builders import a_plan
from tests.support.examples import first_daily


def report(**changes: Any) -> str:
    fields = json.loads(Report(epoch=1, step=1, loss=1.0, steps_per_second=1.0).to_json())
    return json.dumps({**fields, **changes})


LIES = {
    "nesting": (REPORT_ANNOTATION, "[" * 1100),
    "nesting in a new key": (REPORT_ANNOTATION, '{"epoch":1,"x":' + "[" * 1100),
    "a negative speed": (REPORT_ANNOTATION, report(stepsPerSecond=-1)),
    "no speed": (REPORT_ANNOTATION, report(stepsPerSecond=0)),
    "NaN": (REPORT_ANNOTATION, report(stepsPerSecond=float("nan"))),
    "Infinity": (REPORT_ANNOTATION, report(stepsPerSecond=float("inf"))),
    "a tiny speed": (REPORT_ANNOTATION, report(stepsPerSecond=5e-324)),
    "a huge speed": (REPORT_ANNOTATION, report(stepsPerSecond=1e308)),
    "a huge step": (REPORT_ANNOTATION, report(step=10**30)),
    "a late rebalance": (REPORT_ANNOTATION, report(rebalances=1, lastRebalanceStep=10**25)),
    "a late checkpoint": (REPORT_ANNOTATION, report(checkpointStep=10**25)),
    "an epoch of the future": (ACK_ANNOTATION, '{"epoch":2147483647,"step":0}'),
    "a last step of 5,000 digits": (FINISHED_ANNOTATION, "9" * 5000),
    "an end without a last step": (END_REASON_ANNOTATION, "enough"),
    "an endless reason": (END_REASON_ANNOTATION, "x" * 100_000),
    "a binary proposal": (PROPOSAL_ANNOTATION, "\u0000\ufffd"),
}


@dataclasses.dataclass(slots=True)
class Liar(Trainer):
    """It trains, and overwrites one of its messages each time; ``{step}`` in it counts up."""

    annotation: str = ""
    text: str = ""
    told: int = 0

    def act(self, world: World, now: Time) -> None:
        Trainer.act(self, world, now)
        self.told += 1
        text = self.text.replace('"step": 1,', f'"step": {self.told},')
        if self.annotation and self.epoch:
            world.patch(
                LEASE, self.namespace, self.job, {"metadata": {"annotations": {self.annotation: text}}}
            )


def worker_of(simulation: Simulation) -> tuple[ReconcileWorker, list[float]]:
    """A worker of the operator's queue, and the pauses after which it asks to look again."""
    later: list[float] = []
    again = lambda key, seconds: later.append(seconds)  # noqa: E731
    return ReconcileWorker(simulation.reconciler, metrics=simulation.metrics, again=again), later


async def with_liar(**nodes: tuple[str, int]) -> tuple[Simulation, Liar]:
    """A job that runs, and does not lie yet."""
    simulation = Simulation(nodes=nodes)
    simulation.add_job("liar", totalSteps=10**6)
    simulation.trainers["liar"] = liar = Liar(NAMESPACE, "liar", total=10**6)
    await simulation.running("liar")
    return simulation, liar


@pytest.mark.slow
@pytest.mark.parametrize(("annotation", "text"), first_daily(LIES.values(), 3), ids=LIES.keys())
async def test_a_lie_does_not_delay_the_jobs_of_others(annotation, text):
    """Three jobs that arrive meanwhile run to their end, and the liar itself is still looked after."""
    simulation, liar = await with_liar(fast=("fast", 6))
    liar.annotation, liar.text = annotation, text
    for name in ("one", "two", "three"):
        simulation.add_job(name, stages=(1, 1), totalSteps=40)
    for name in ("one", "two", "three"):
        await simulation.until(lambda name=name: simulation.state(name) == "Succeeded", ticks=30)
    assert simulation.status("liar").state == "Running"


@pytest.mark.slow
async def test_a_refused_message_is_a_condition_and_one_event():
    """With the annotation and the field; the status is not written for each; readable messages end it."""
    simulation, liar = await with_liar(fast=("fast", 2))
    liar.annotation, liar.text = REPORT_ANNOTATION, report(stepsPerSecond=-1)
    simulation.world.log.clear()
    await simulation.ticks(50)
    condition = simulation.condition("liar", "MessagesReadable")
    assert (condition.is_true, condition.reason) == (False, "MessageRefused")
    assert "annotation ballast.dev/report: Report.stepsPerSecond: -1 is below 0" in condition.message
    assert len([line for line in simulation.world.log if line.startswith("create Event liar")]) == 1
    assert simulation.world.log.count("apply TrainingJob liar status") < 15
    liar.annotation = ""
    await simulation.until(lambda: simulation.status("liar").is_true("MessagesReadable"), ticks=100)


async def test_a_status_that_cannot_be_read_hides_no_other_job(monkeypatch):
    """Launches of others still count GPUs; the job itself says what is wrong with it."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    simulation.world.put(JOB, {**job("broken"), "spec": {}, "status": {"launches": "many"}})
    simulation.add_job("one")
    simulation.add_job("two")
    healthy = [(NAMESPACE, "one"), (NAMESPACE, "two")]
    monkeypatch.setattr(simulation, "keys", lambda: healthy)  # passes that fail would end the test
    await simulation.running("one", "two")
    worker, later = worker_of(simulation)
    for _ in range(3):
        await worker((NAMESPACE, "broken"))
    await simulation.report()
    assert later == [5.0]  # then it can be read, without its number of launches
    assert simulation.world.events.count("InternalError") == 1
    assert simulation.condition("broken", "Admitted").reason == "Misconfigured"


@pytest.mark.parametrize(
    "status", [{"launches": "many"}, {"allocation": "none"}, {"conditions": [1]}, "lost"]
)
async def test_a_status_that_somebody_has_made_unreadable_is_the_last_written_again(status):
    """Where the definition lets it be stored: the gang trains on, and its end is noticed."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    await simulation.run_job("one", totalSteps=200)
    whole = simulation.status("one")
    worker, _ = worker_of(simulation)
    for _ in range(2):  # the second time before any pass has succeeded
        item = simulation.world.get(JOB, NAMESPACE, "one")
        kept = {**item["status"], **status} if isinstance(status, dict) else status
        simulation.world.put(JOB, {**item, "status": kept})
        await simulation.look()
        await worker((NAMESPACE, "one"))
        assert simulation.status("one").allocation == whole.allocation
    assert simulation.condition("one", "Reconciled").reason == "InternalError"
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").launches == 1 and simulation.condition("one", "Reconciled").is_true


@pytest.mark.parametrize(
    ("status", "held"),
    [
        ({"costSoFar": "much"}, True),
        ({"launches": "many"}, True),
        ({"conditions": [1]}, True),
        ({"allocation": "none"}, False),
        ("lost", False),
    ],
)
async def test_what_can_be_read_of_a_status_is_kept_by_an_operator_that_begins(status, held):
    """It has written nothing yet: what cannot be read counts as never written, and the job goes on."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    await simulation.run_job("one", totalSteps=200)
    before, item = simulation.status("one"), simulation.world.get(JOB, NAMESPACE, "one")
    kept = {**item["status"], **status} if isinstance(status, dict) else status
    simulation.world.put(JOB, {**item, "status": kept})
    simulation.start_operator()
    await simulation.look()
    worker, _ = worker_of(simulation)
    await worker((NAMESPACE, "one"))
    if held:
        assert simulation.status("one").allocation == before.allocation
        assert simulation.status("one").launches == before.launches
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=400)
    assert simulation.status("one").launches == before.launches + (not held)


PART = {"pool": "fast", "gpuType": "fast", "speed": 1.0}


@pytest.mark.parametrize(
    "edit",
    [
        {"allocation": {"parts": [{**PART, "pods": ["stray"]}, {**PART, "pool": "slow"}]}},
        {"lostSteps": 2**63 - 1, "progress": {"step": 199}, "data": {"steps": 2**53}},
        {"isolated": {"seconds": 1e308, "step": 2**53}},
    ],
    ids=["parts", "lost steps", "isolated"],
)
async def test_a_job_goes_on_with_a_status_that_a_hand_has_written(edit):
    """Of values that the definition allows, and no operator writes: every pass of it succeeds."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one", totalSteps=200)
    simulation.world.patch(JOB, NAMESPACE, "one", {"status": edit})
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=100)
    assert simulation.status("one").launches == 1
    assert simulation.status("one").lost_steps <= 2**53  # beyond 2**63 an API server refuses a status


async def test_a_status_that_the_clusters_policies_refuse_is_told_by_an_event(monkeypatch):
    """Nothing else can tell it; the job goes on once they let the operator write."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    await simulation.run_job("one", totalSteps=200)
    worker, _ = worker_of(simulation)

    async def refuses(*_):
        raise NotAllowed("HTTP 422 ValidatingAdmissionPolicy 'none' denied the request")

    said, create = [], simulation.cluster.create

    async def told(kind, body):
        said.extend([body["reason"], body["message"]] if kind is EVENT else [])
        return await create(kind, body)

    with monkeypatch.context() as policy:
        policy.setattr(simulation.cluster, "write_status", refuses)
        policy.setattr(simulation.cluster, "create", told)
        simulation.change("one", suspend=True)
        await simulation.look()
        await worker((NAMESPACE, "one"))
        await simulation.report()
    reason, message = said
    assert reason == "ActionRefused" and "an admission policy refuses" in message and "To fix: exc" in message
    await simulation.until(lambda: simulation.state("one") == "Suspended")


async def test_a_lapse_of_the_lease_is_not_logged_again_for_each_job(monkeypatch, caplog):
    """The leader's log says it once: of 5,000 jobs hundreds are looked at in each second of it.

    However long it lasts, jobs do not wait long after it.
    """
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    await simulation.run_job("one")
    worker, later = worker_of(simulation)

    def lapsed() -> None:
        raise Fenced("lease not renewed for now")

    monkeypatch.setattr(simulation.reconciler, "_decide", lambda view: lapsed())
    with caplog.at_level("INFO"):
        for _ in range(10):
            await worker((NAMESPACE, "one"))
    assert later == [1.0, 2.0, 4.0, *[5.0] * 7] and not caplog.records


async def test_an_error_in_a_pass_is_shown_on_its_job(monkeypatch):
    """As a condition and an Event, until a pass succeeds."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    await simulation.run_job("one")
    worker, _ = worker_of(simulation)
    with monkeypatch.context() as broken:
        broken.setattr(simulation.reconciler, "_decide", lambda view: {}["a bug"])
        for _ in range(5):
            await worker((NAMESPACE, "one"))
    condition = simulation.condition("one", "Reconciled")
    assert (condition.is_true, condition.reason) == (False, "InternalError")
    assert condition.message == "KeyError: 'a bug'"
    await simulation.tick()
    assert simulation.status("one").is_true("Reconciled")
    assert simulation.state("one") == "Running"


@pytest.mark.parametrize(
    "counters",
    [{"launches": 2**31 - 1}, {"restarts": {"PodLost": 1025}}, {"restarts": {"PodLost": 2**63 - 1}}],
)
async def test_a_counter_may_be_of_any_size(counters):
    """The next launch has a number that no pod or plan of the job has; no pause or sum is out of range."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    await simulation.run_job("one", totalSteps=200)
    item = simulation.world.get(JOB, NAMESPACE, "one")
    simulation.world.put(JOB, {**item, "status": {**item["status"], **counters}})
    simulation.world.drop(POD, NAMESPACE, "one-1-0")
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=600)
    status = simulation.status("one")
    assert status.launches == 2 and all(count < 2**63 for count in status.restarts.values())


LAST_EPOCH = a_plan(("one-1-0",), job="one", epoch=2**31 - 1).to_json()


@pytest.mark.parametrize("text", ["", "[" * 2000, '{"epoch": "one"}', "null", LAST_EPOCH])
async def test_a_plan_that_someone_overwrites_is_written_again(text):
    """The same epoch with the same ranks; the gang is not stopped."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one")
    name = plan_config_map_name("one")
    before = simulation.world.get(CONFIG_MAP, NAMESPACE, name)["data"][PLAN_KEY]
    simulation.world.patch(CONFIG_MAP, NAMESPACE, name, {"data": {PLAN_KEY: text, "config.json": "[["}})
    simulation.trainers["one"].silent = True
    await simulation.tick()
    simulation.trainers["one"].silent = False
    assert simulation.world.get(CONFIG_MAP, NAMESPACE, name)["data"][PLAN_KEY] == before
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").launches == 1


async def test_a_plan_that_someone_makes_immutable_is_named_until_it_is_deleted():
    """The operator may not delete it; the next launches hold no GPUs for it and do not count as failed."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one", backoffLimit=0)
    simulation.change("one", suspend=True)
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    name = plan_config_map_name("one")
    simulation.world.patch(CONFIG_MAP, NAMESPACE, name, {"immutable": True})
    simulation.change("one", suspend=False)
    await simulation.until(lambda: simulation.condition("one", "Admitted").reason == "NotAllowed")
    said = simulation.condition("one", "Admitted").message
    assert "field is immutable" in said and f"To fix: kubectl delete configmaps {name} -n {NAMESPACE}" in said
    assert not simulation.pods("one") and simulation.state("one") == "Waiting"
    simulation.world.drop(CONFIG_MAP, NAMESPACE, name)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")


@pytest.mark.parametrize("kind", [CONFIG_MAP, LEASE])
async def test_an_object_of_a_running_job_that_someone_deletes_is_put_back(kind):
    """At the next pass; the trainer continues, and epochs continue where they were."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    simulation.add_job("one", stages=(2, 4), trainer={"shrink_at": 30, "shrink_to": 2}, totalSteps=200)
    await simulation.until(lambda: bool(simulation.status("one").repacks))
    name = plan_config_map_name("one") if kind is CONFIG_MAP else "one"
    simulation.world.drop(kind, NAMESPACE, name)
    await simulation.tick()
    assert simulation.world.get(kind, NAMESPACE, name) is not None
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").launches == 1


def refuse_texts(monkeypatch, part: str) -> None:
    """From now on the API server refuses every status of a job with ``part`` in it."""
    write = FakeCluster.write_status

    async def refuse(self: FakeCluster, kind: Kind, body: Any) -> Any:
        if kind is JOB and part in json.dumps(body["status"], ensure_ascii=False):
            raise Rejected(f"HTTP 422 status is invalid: {part}")
        return await write(self, kind, body)

    monkeypatch.setattr(FakeCluster, "write_status", refuse)


@pytest.mark.slow
async def test_a_status_that_is_refused_for_a_text_does_not_hold_the_gpus(monkeypatch):
    """The job fails as it has to, says what the API server said, and another job gets its GPUs."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    refuse_texts(monkeypatch, "\u2603")
    simulation.add_job("one", backoffLimit=0)
    simulation.add_job("two")
    await simulation.running("one")
    message = TerminationMessage(reason=ExitReason.FAILED, message="snow \u2603", step=3)
    end_pod(simulation.world, NAMESPACE, simulation.pods("one")[0]["metadata"]["name"], 1, message)
    await simulation.until(lambda: simulation.state("one") == "Failed")
    status = simulation.status("one")
    condition = status.condition("Reconciled")
    assert (condition.is_true, condition.reason) == (False, "StatusRefused")
    assert "HTTP 422 status is invalid: ?" in condition.message
    assert "snow ?" in status.condition("Failed").message
    assert (status.allocation, status.restarts) == (None, {"UserError": 1})
    await simulation.running("two")
    simulation.world.log.clear()
    await simulation.ticks(20)
    assert simulation.world.log.count("apply TrainingJob one status") == 0


async def test_a_deletion_that_is_refused_is_told_and_tried_ever_more_rarely(monkeypatch):
    """A webhook keeps the pods of a suspended job: its condition quotes the webhook, until it lets go."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one", totalSteps=100_000)
    delete = FakeCluster.delete

    async def refuse(self: FakeCluster, kind: Kind, *args: Any, **how: Any) -> Any:
        if kind is POD:
            raise NotAllowed('HTTP 403 admission webhook "keep.example" denied the request: pods stay')
        return await delete(self, kind, *args, **how)

    with monkeypatch.context() as refusing:
        refusing.setattr(FakeCluster, "delete", refuse)
        simulation.change("one", suspend=True)
        await simulation.until(lambda: simulation.condition("one", "Reconciled") is not None)
        refusing.setattr(simulation, "keys", list)
        worker, later = worker_of(simulation)
        for _ in range(6):
            await worker((NAMESPACE, "one"))
    condition = simulation.condition("one", "Reconciled")
    assert (condition.is_true, condition.reason) == (False, "ActionRefused")
    assert 'admission webhook "keep.example" denied the request: pods stay' in condition.message
    assert later == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert worker.failing == 1
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    assert simulation.status("one").is_true("Reconciled")


async def test_a_job_of_which_no_status_is_taken_says_so_and_is_left_alone(monkeypatch):
    """Its launch is never written, so nothing is made for it; it is looked at more and more rarely."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.add_job("one")
    refuse_texts(monkeypatch, '"allocation"')
    monkeypatch.setattr(simulation, "keys", list)  # passes that fail would end the test
    worker, later = worker_of(simulation)
    await simulation.tick()
    for _ in range(12):
        await worker((NAMESPACE, "one"))
    condition = simulation.condition("one", "Reconciled")
    assert (condition.is_true, condition.reason) == (False, "StatusRefused")
    assert (later[-1], worker.failing) == (3600.0, 1)
    assert simulation.pods("one") == []
    assert simulation.world.log.count("apply TrainingJob one status") <= 2
