"""What cannot work is said in a condition, with what to change; the operator continues."""

import contextlib
import itertools
from collections.abc import Callable
from unittest import mock

import pytest
from ballast_operator.api.base import Condition
from ballast_operator.api.conditions import JobReason, PolicyReason
from ballast_operator.api.training_job_status import TrainingJobStatus, waits_alone
from ballast_operator.errors import ActionRefused, Forbidden
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NODE, POLICY
from ballast_operator.reconcile import changes, reconciler
from ballast_operator.waits import WaitReason
from ballast_policies.contract.messages import CONFIG_KEY, lease_name, plan_config_map_name

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import (
    NAMESPACE,
    Simulation,
    fast_and_slow,
    job,
    policy,
    template,
)
from tests.operator.views.builders import NOW

TWO_STAGES = {"minStages": 2, "maxStages": 2, "microbatches": 8, "globalBatchSize": 16}
ODD_BATCH = {"microbatches": 7, "globalBatchSize": 7}
JOB_CASES = {
    "a GPU type that no pool has": (
        {"gpuTypes": ["h100"]},
        JobReason.NO_MATCHING_GPU_TYPE,
        "gpuTypes allows h100; the node pools have fast, slow",
    ),
    "more stages than any pool has GPUs": (
        {"stages": (4, 4)},
        JobReason.EXCEEDS_CAPACITY,
        "needs 4 GPUs of one pool; its pools have: fast 2, slow 2",
    ),
    "more stages than layers, from before the rule": (
        {"stages": (3, 4), "model": {"name": "gpt", "layers": 2}},
        JobReason.MISCONFIGURED,
        "maxStages is above model.layers",
    ),
    "more stages a rank than layers": (
        {
            "model": {"name": "gpt", "layers": 3},
            "pipeline": {**TWO_STAGES, "schedule": "Interleaved1F1B"},
        },
        JobReason.MISCONFIGURED,
        "pipeline.minStages=2 with 2 stages each exceeds model.layers=3",
    ),
    "microbatches that do not go into rounds": (
        {"pipeline": {**TWO_STAGES, **ODD_BATCH, "schedule": "ZeroBubbleH1"}},
        JobReason.MISCONFIGURED,
        "pipeline.microbatches=7 does not suit ZeroBubbleH1 on 2 ranks",
    ),
    "a field of a newer release": (
        {"quantumStages": 3},
        JobReason.MISCONFIGURED,
        "spec.quantumStages: there is no such field",
    ),
    "resources that are none": (
        {"template": template(overhead={"cpu": ["1"]})},
        JobReason.MISCONFIGURED,
        "To fix: resources and overhead as quantities",
    ),
    "suspended from the start": ({"suspend": True}, JobReason.SUSPENDED, "spec.suspend is set"),
}


@pytest.mark.parametrize(("spec", "reason", "words"), JOB_CASES.values(), ids=JOB_CASES.keys())
async def test_a_job_that_cannot_run_says_why_and_the_others_run(spec, reason, words):
    """Admitted is False with a stable reason and numbers; a good job beside it is launched."""
    simulation = fast_and_slow()
    simulation.add_job("bad", **spec)
    simulation.add_job("good")
    await simulation.until(lambda: simulation.state("good") == "Succeeded")
    await simulation.refused("bad", reason, words)
    assert simulation.pods("bad") == []


@pytest.mark.parametrize("spec", ["text", ["a", "list"], 7], ids=lambda spec: type(spec).__name__)
async def test_a_spec_that_is_no_object_is_said_and_the_others_run(spec):
    """A CRD that was installed without its schema lets it through."""
    simulation = fast_and_slow()
    simulation.world.put(JOB, {**job("bad"), "spec": spec})
    simulation.add_job("good")
    await simulation.until(lambda: simulation.state("good") == "Succeeded")
    await simulation.refused("bad", JobReason.MISCONFIGURED, "spec: ")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["", None], ids=["unreadable configuration", "as launched"])
async def test_a_gang_whose_spec_cannot_be_used_any_more_saves_and_gives_its_gpus_back(config):
    """By an edit, or stricter rules. It says why, others get its GPUs, and a repair resumes it."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=60)
    await simulation.run_job("bad")
    if config is not None:
        name = plan_config_map_name("bad")
        simulation.world.patch(CONFIG_MAP, NAMESPACE, name, {"data": {CONFIG_KEY: config}})
    simulation.change("bad", quantumStages=3)
    await simulation.run_job("good")
    admitted, status = simulation.condition("bad", "Admitted"), simulation.status("bad")
    assert (admitted.reason, status.allocation) == (JobReason.MISCONFIGURED, None)
    assert "spec.quantumStages: there is no such field" in admitted.message
    assert (simulation.pods("bad"), status.restarts) == ([], {})
    saved = simulation.trainers["bad"].step
    simulation.change("bad", quantumStages=None)
    await simulation.until(lambda: simulation.state("bad") == "Succeeded")
    assert 0 < saved <= 100
    assert simulation.status("bad").launches == 2


async def test_the_end_of_a_job_whose_spec_cannot_be_used_any_more_stays_told_until_its_time_is_over():
    """By an edit, or stricter rules: its conditions stay, and ``ttlSecondsAfterFinished`` holds."""
    simulation = Simulation(nodes={"a": ("fast", 2)})
    simulation.add_job("bad", ttlSecondsAfterFinished=100)
    await simulation.until(lambda: simulation.state("bad") == "Succeeded")
    before = simulation.status("bad")
    simulation.change("bad", quantumStages=3)
    await simulation.ticks(3)
    after = simulation.status("bad")
    assert after.replace(observed_generation=before.observed_generation) == before
    await simulation.tick(seconds=100)
    assert simulation.world.get(JOB, NAMESPACE, "bad") is None


@pytest.fixture
def one_rate(monkeypatch) -> Callable[[float], None]:
    """Sets how many writes a second tell of progress and of why jobs wait."""

    def set_rate(per_second: float) -> None:
        for module in (reconciler, changes):
            monkeypatch.setattr(module, "PROGRESS_WRITES_PER_SECOND", per_second)

    return set_rate


async def waiting_for_the_first() -> tuple[Simulation, list[str]]:
    """A job on the only node, and five that wait for it."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)}, roundSeconds=80_000)
    simulation.by_queue = True
    simulation.add_job("first", totalSteps=10**6)
    simulation.trainers["first"].start_seconds = 30
    await simulation.ticks(2)
    waiting = [f"w{number}" for number in range(5)]
    for name in waiting:
        simulation.add_job(name)
    await simulation.ticks(2)
    return simulation, waiting


def writes_of(simulation: Simulation, name: str) -> list[str]:
    """The writes of the job's status."""
    return [line for line in simulation.world.log if line.endswith(f"{name} status")]


@pytest.mark.slow
async def test_the_words_of_jobs_that_wait_are_written_at_a_rate_that_all_of_them_share(one_rate):
    """A gang's first step changes them for all that wait for its GPUs: one after the other is told."""
    simulation, waiting = await waiting_for_the_first()

    def told() -> int:
        first = f"{NAMESPACE}/first has been"
        return sum(first not in simulation.condition(w, "Admitted").message for w in waiting)

    assert told() == 0
    one_rate(len(simulation.present()) / 20)
    simulation.world.log.clear()
    await simulation.running("first")
    numbers = [told()]
    for _ in range(50):
        await simulation.tick()
        numbers.append(told())
    assert numbers[20:] == [5] * 31
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(numbers))
    assert [len(writes_of(simulation, name)) for name in waiting] == [1] * 5


@pytest.mark.slow
async def test_a_node_that_comes_and_goes_costs_no_write_of_each_waiting_job_each_time(one_rate):
    """They have another reason each time, and share the rate of their words; an edit is answered at once."""
    simulation, waiting = await waiting_for_the_first()
    one_rate(len(simulation.present()) / 20)
    simulation.world.log.clear()
    for unschedulable in (True, False):
        simulation.world.patch(NODE, "", "fast-0", {"spec": {"unschedulable": unschedulable}})
        await simulation.tick()
    assert not any(writes_of(simulation, name) for name in waiting)
    await simulation.running("first")
    await simulation.ticks(20)
    simulation.world.log.clear()
    for number in range(40):
        simulation.world.patch(NODE, "", "fast-0", {"spec": {"unschedulable": number % 2 == 0}})
        await simulation.tick()
    assert 0 < sum(len(writes_of(simulation, name)) for name in waiting) <= 3 * len(waiting)
    simulation.change("w0", weight=2.0)
    with mock.patch.object(simulation, "decide", mock.AsyncMock()):
        await simulation.tick()  # its pass comes before the decision on it
    simulation.world.patch(NODE, "", "fast-0", {"spec": {"unschedulable": True}})
    await simulation.tick()
    told = simulation.condition("w0", "Admitted")
    assert (told.reason, told.observed_generation) == (JobReason.EXCEEDS_CAPACITY, 2)

    def reasons() -> set[str]:
        return {simulation.condition(name, "Admitted").reason for name in waiting}

    await simulation.until(lambda: reasons() == {JobReason.EXCEEDS_CAPACITY}, ticks=30)
    await simulation.ticks(60)  # each was told long ago: they take turns all the same
    simulation.world.log.clear()
    simulation.world.patch(NODE, "", "fast-0", {"spec": {"unschedulable": False}})
    await simulation.tick()
    assert sum(len(writes_of(simulation, name)) for name in waiting) <= 1
    await simulation.until(lambda: reasons() == {JobReason.WAITING_FOR_CAPACITY}, ticks=30)


@pytest.mark.parametrize(
    ("reason", "edits", "shares"),
    [
        (JobReason.WAITING_FOR_CAPACITY, 0, True),
        (JobReason.PENDING, 0, False),
        (JobReason.WAITING_FOR_CAPACITY, 1, False),
    ],
    ids=["another reason", "the first", "of an edited job"],
)
def test_another_reason_to_wait_shares_the_rate_and_the_first_one_is_written_at_once(reason, edits, shares):
    """As the answer to an edit is."""
    was = Condition(type="Admitted", status="False", reason=reason, last_transition_time=NOW)
    said = was.replace(reason=JobReason.EXCEEDS_CAPACITY, observed_generation=edits)
    old, new = (TrainingJobStatus(conditions=(each,)) for each in (was, said))
    assert waits_alone(old, new) is shares


@pytest.mark.slow
async def test_a_node_that_matches_two_pools_takes_no_gangs_and_the_others_do():
    """The condition names node and pools; who runs there stays, and new jobs start on the other nodes."""
    simulation = Simulation(nodes={"a": ("fast", 4), "b": ("fast", 3)}, roundSeconds=5)
    endless = {"totalSteps": 10_000}
    await simulation.run_job("one", **endless)
    (held,) = set(simulation.status("one").allocation.nodes)
    simulation.world.patch(NODE, "", held, {"metadata": {"labels": {"zone": "z"}}})
    with simulation.changed_pools() as pools:
        pools["all"] = {"name": "all", "nodeSelector": {"zone": "z"}, "gpuType": "slow"}
    await simulation.run_job("two", stages=(1, 1), **endless)
    await simulation.ticks(10)
    assert (held, simulation.status("two").allocation.nodes) == ("b", ("a",))
    assert (simulation.state("one"), simulation.status("one").launches) == ("Running", 1)
    valid, ready = simulation.policy_condition("Valid"), simulation.policy_condition("Ready")
    assert (valid["status"], valid["reason"]) == ("True", PolicyReason.OVERLAPPING_POOLS)
    assert f"node {held} matches pools fast and all: no gang is started there. To fix" in valid["message"]
    assert ready["status"] == "True"


async def test_decisions_that_fail_twice_are_told_and_recover():
    """Ready becomes False with the error and the probes fail; the next decision that succeeds ends it."""
    simulation = fast_and_slow()
    await simulation.run_job("one", totalSteps=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            simulation.allocator.decider, "build_problem", mock.Mock(side_effect=KeyError("pool x"))
        )
        await simulation.attempt()
        assert simulation.policy_condition("Ready")["status"] == "True"
        assert not simulation.waits.broken
        await simulation.attempt()
    ready = simulation.policy_condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", PolicyReason.DECISIONS_FAIL)
    assert "the last 2 decisions failed" in ready["message"] and "KeyError: 'pool x'" in ready["message"]
    assert simulation.policy_condition("Valid")["status"] == "True"
    assert simulation.policy()["status"]["gpus"] > 0
    assert simulation.waits.broken and not simulation.waits.ready
    await simulation.look()
    await simulation.attempt()
    assert simulation.policy_condition("Ready")["status"] == "True"
    assert not simulation.waits.broken


CIRCLE = {"entities": {"vision": {"parent": "speech"}, "speech": {"parent": "vision"}}}
"""CEL has no loops: only the operator sees it."""


@pytest.mark.parametrize(
    ("spec", "kind", "reason", "words"),
    [
        ({}, "Ready", PolicyReason.ANOTHER_POLICY_IN_FORCE, "default"),
        ({"objective": CIRCLE}, "Valid", PolicyReason.MISCONFIGURED, "parents lead in a circle"),
    ],
)
async def test_the_older_of_two_policies_is_in_force(spec, kind, reason, words):
    """There is one at a time, whether the other can be used or not; the other says why it is not that one."""
    simulation = fast_and_slow()
    second = policy("fast", **spec)
    second["metadata"] = {"name": "second", "creationTimestamp": "2026-06-01T00:00:00Z"}
    simulation.world.put(POLICY, second)
    await simulation.run_job("one")
    told = simulation.policy_condition(kind, "second")
    assert (told["status"], told["reason"]) == ("False", reason)
    assert words in told["message"]
    assert simulation.policy_condition("Ready")["reason"] == PolicyReason.IN_FORCE
    assert simulation.waits.ready and simulation.waits.lines() == []


async def test_a_dry_run_says_what_it_would_do_and_does_nothing():
    """status.proposed has the placement; no pod is made."""
    simulation = fast_and_slow(dryRun=True)
    simulation.add_job("one")
    await simulation.ticks(3)
    assert simulation.pods("one") == []
    await simulation.refused("one", JobReason.DRY_RUN, "would get 2 x")
    (proposed,) = simulation.policy()["status"]["proposed"]
    assert proposed["job"] == f"{NAMESPACE}/one"
    assert proposed["gpus"] == 2


async def test_a_pool_without_nodes_and_one_without_gpus_are_warnings():
    """Valid stays True: nodes may come; the message names the pool."""
    simulation = Simulation(nodes={"a": ("fast", 2)})
    more = policy("fast", "later")
    simulation.world.put(POLICY, more)
    await simulation.tick()
    valid = simulation.policy_condition("Valid")
    assert (valid["status"], valid["reason"]) == ("True", PolicyReason.NO_SUCH_NODES)
    assert "later" in valid["message"]
    simulation.world.put(NODE, node("c", "later", 0))
    await simulation.tick()
    assert simulation.policy_condition("Valid")["reason"] == PolicyReason.NO_GPUS


@pytest.mark.slow
async def test_an_idle_operator_writes_nothing():
    """Bounded use of the API server: with nothing new, ten rounds cost no write."""
    simulation = fast_and_slow()
    simulation.add_job("waits", gpuTypes=["h100"])
    simulation.add_job("done")
    await simulation.until(lambda: simulation.state("done") == "Succeeded")
    for _ in range(2):  # the next round closes the account of the job that is done, and saves that
        await simulation.tick(seconds=60.0)
    before = simulation.world.writes
    await simulation.ticks(10, seconds=60.0)
    assert simulation.world.writes == before, simulation.world.log[before:]


IN_EACH_STATE = {
    "Waiting": {"stages": (4, 4)},
    "Suspended": {"suspend": True},
    "Running": {"totalSteps": 100_000},
    "Succeeded": {"totalSteps": 20},
    "Failed": {"totalSteps": 100_000, "activeDeadlineSeconds": 10},
}


@pytest.mark.parametrize(("state", "spec"), IN_EACH_STATE.items(), ids=IN_EACH_STATE.keys())
async def test_conditions_that_somebody_takes_out_come_back(state, spec):
    """Each alone and all of them, without another change; a job that has ended is not launched again."""
    simulation = fast_and_slow()
    simulation.add_job("one", **spec)
    await simulation.until(lambda: simulation.state("one") == state)
    whole = simulation.status("one")
    truth = {each.type: each.status for each in whole.conditions}
    for kinds in (*({kind} for kind in truth), truth.keys()):
        kept = [each for each in whole.to_dict()["conditions"] if each["type"] not in kinds]
        simulation.world.patch(JOB, NAMESPACE, "one", {"status": {"conditions": kept}})
        await simulation.ticks(3)
        await simulation.tick(seconds=130)  # else it is a controller that does it again and again
        status = simulation.status("one")
        assert {each.type: each.status for each in status.conditions} == truth, kinds
        assert (simulation.state("one"), status.launches) == (state, whole.launches)


@pytest.mark.parametrize(
    ("kind", "status", "what"),
    [
        (JOB, {"conditions": []}, "its status"),
        (JOB, None, "its status"),
        (JOB, {"allocation": None}, "its status"),
        (CONFIG_MAP, None, "ConfigMap one-plan"),
        (LEASE, None, "Lease one"),
    ],
)
async def test_what_a_controller_undoes_again_and_again_is_put_right_ever_later(kind, status, what):
    """It is told on the job, by an Event and as a failing job; others go on; it ends with the controller."""
    simulation = fast_and_slow(roundSeconds=6000)
    simulation.add_job("one", totalSteps=1_000_000)
    simulation.add_job("two", totalSteps=1_000_000)
    await simulation.running("one", "two")
    for second in range(150):
        if kind is JOB:
            simulation.world.patch(JOB, NAMESPACE, "one", {"status": status})
        else:
            simulation.world.drop(kind, NAMESPACE, what.split()[1])
        await simulation.tick()
        if second == 75:
            simulation.world.log.clear()
    assert sum(" one" in line for line in simulation.world.log) < 40, simulation.world.log
    assert not any(" two-" in line for line in simulation.world.log)
    assert simulation.observer.findings.contested((NAMESPACE, "one")) == what
    assert simulation.observer.findings.all_contested() == 1 and "ChangedByOthers" in simulation.world.events
    await simulation.ticks(200)
    assert simulation.state("one") == simulation.state("two") == "Running"
    assert simulation.condition("one", "Reconciled").is_true
    assert simulation.observer.findings.all_contested() == 0


async def test_what_an_api_server_refuses_to_put_right_is_nobody_elses_doing():
    """It is not taken for a controller's work, and once it is allowed it does not wait."""
    simulation = fast_and_slow(roundSeconds=6000)
    await simulation.run_job("one", totalSteps=1_000_000)
    tried = []

    def refusing(kind, body):
        if kind is LEASE:
            tried.append(body)
            raise Forbidden("cannot create leases")

    allowing, simulation.world.admission = simulation.world.admission, refusing
    simulation.world.drop(LEASE, NAMESPACE, lease_name("one"))
    for _ in range(20):
        with contextlib.suppress(ActionRefused):
            await simulation.tick()
    assert len(tried) >= 20 and simulation.observer.findings.all_contested() == 0
    simulation.world.admission = allowing
    await simulation.tick()
    assert simulation.world.get(LEASE, NAMESPACE, lease_name("one")) is not None


LACKING = frozenset({"observedGeneration", "lastDecision", "jobsRunning"})
"""Of jobs and of the ClusterPolicy; what a job has in each status."""


async def after(lacking: frozenset[str]) -> tuple[Simulation, list[str]]:
    """A job that runs, and the writes of statuses meanwhile."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)}, roundSeconds=10)
    simulation.world.lacking = lacking
    simulation.cluster.on_dropped = lambda kind, fields: simulation.waits.begin(
        WaitReason.DEFINITIONS, f"no {', '.join(fields)}", to_fix="install them", subject=kind.plural
    )
    await simulation.run_job("one", stages=(1, 1), totalSteps=100_000)
    simulation.world.log.clear()
    await simulation.ticks(100)
    return simulation, [line for line in simulation.world.log if line.endswith(" status")]


async def test_they_cost_no_writes_and_are_told_on_the_cluster_policy():
    """What is dropped differs from what is stored in each pass, and in each round."""
    right, usual = await after(frozenset())
    simulation, found = await after(LACKING)
    assert found == usual
    ready = simulation.policy_condition("Ready")
    assert ready["status"] == "True"
    assert ready["message"].endswith(
        "; no status.jobsRunning, status.observedGeneration. To fix: install them; "
        "no status.lastDecision, status.observedGeneration. To fix: install them"
    )
    assert right.policy_condition("Ready")["message"] in ready["message"]


async def test_definitions_that_are_brought_up_to_date_are_found_out():
    """The fields are written again once a watch has ended; then they are kept."""
    simulation, _ = await after(LACKING)
    assert not simulation.status("one").observed_generation
    simulation.world.lacking = frozenset()
    simulation.cluster.dropped.ask_again(JOB)
    await simulation.ticks(3)
    assert simulation.status("one").observed_generation == 1


@pytest.mark.slow
async def test_a_job_ends_whatever_conditions_others_have_put_beside_its_own():
    """There is room for all of the operator's and as many of theirs."""
    simulation = fast_and_slow()
    await simulation.run_job("one", totalSteps=100)
    others = tuple(
        Condition(type=f"example.com/{number}", status="True", reason="Theirs", last_transition_time=NOW)
        for number in range(16)
    )
    conditions = [each.to_dict() for each in (*simulation.status("one").conditions, *others)]
    simulation.world.patch(JOB, NAMESPACE, "one", {"status": {"conditions": conditions}})
    await simulation.reached("Succeeded", "one", ticks=400)
    assert set(others) <= set(simulation.status("one").conditions)
