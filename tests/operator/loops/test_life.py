"""A job's life, from its creation to its end, over a cluster in memory."""

import asyncio
import datetime

import pytest
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD
from ballast_operator.views.clock import show
from ballast_policies.contract.messages import (
    FINISHED_ANNOTATION,
    ExitCode,
    ExitReason,
    TerminationMessage,
    plan_config_map_name,
)
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.observed import Cause

from tests.operator.loops.simulated.machines import end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, fast_and_slow, template
from tests.support.waiting import WAIT_SECONDS


async def test_a_job_is_launched_trains_and_succeeds():
    """Two GPUs, two pods, one plan; at the end the GPUs are free and the status says so."""
    simulation = fast_and_slow()
    await simulation.run_job("one")
    assert len(simulation.pods("one")) == 2
    allocation = simulation.status("one").allocation
    assert allocation is not None and allocation.launch == 1
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    status = simulation.status("one")
    assert status.allocation is None and status.progress.step == 100 and not status.restarts
    assert simulation.pods("one") == []


async def test_a_plan_waits_for_the_address_of_each_pod():
    """A kubelet may say that a pod runs before it says where: a plan without an address helps no rank."""
    simulation = fast_and_slow()
    simulation.add_job("one", gpuTypes=["fast"])
    await simulation.until(lambda: len(simulation.pods("one")) == 2)
    known = {"spec": {"nodeName": "a"}, "status": {"phase": "Running"}}
    simulation.world.patch(POD, NAMESPACE, "one-1-1", known)
    await simulation.ticks(3)
    assert simulation.world.get(CONFIG_MAP, NAMESPACE, plan_config_map_name("one")) is None
    simulation.world.patch(POD, NAMESPACE, "one-1-1", {"status": {"podIP": "127.1.0.9"}})
    await simulation.running("one")
    assert [rank.address for rank in simulation.plan("one").ranks][1] == "127.1.0.9"


async def test_a_repack_releases_the_named_pods_and_the_waiting_job_starts_on_their_gpus():
    """Survivors keep their uids; the freed GPU goes to the job that waits."""
    simulation = Simulation(nodes={"a": ("fast", 2)})
    await simulation.run_job("first", trainer={"shrink_at": 30}, totalSteps=1000)
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in simulation.pods("first")}
    await simulation.run_job("second", stages=(1, 1))
    status = simulation.status("first")
    (repack,) = status.repacks
    assert repack.released_pods == ("first-1-1",)
    assert [(kept.name, kept.uid) for kept in repack.survivors] == [("first-1-0", before["first-1-0"])]
    assert repack.pause_ms == 12.5 and repack.step_seconds_after == 0.105
    assert [pod["metadata"]["uid"] for pod in simulation.pods("first")] == [before["first-1-0"]]
    assert status.launches == 1 and not status.restarts


async def test_a_user_error_restarts_the_gang_and_counts_toward_the_limit():
    """The whole gang goes, the next launch resumes from the checkpoint, the message names the culprit."""
    simulation = fast_and_slow()
    simulation.add_job("one", trainer={"pace": 5})
    await simulation.until(lambda: simulation.trainers["one"].step >= 50)
    message = TerminationMessage(reason=ExitReason.FAILED, message="loss is NaN", step=50)
    end_pod(simulation.world, NAMESPACE, "one-1-1", ExitCode.ERROR, message)
    await simulation.tick()
    assert simulation.status("one").restarts == {Cause.USER_ERROR: 1}
    assert "loss is NaN" in simulation.condition("one", "Running").message
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.trainers["one"].resumed_from == [0, 40]
    assert simulation.status("one").launches == 2


async def test_failures_beyond_the_backoff_limit_end_the_job():
    """backoffLimit 1: the second failure of its own doing is the last."""
    simulation = fast_and_slow()
    simulation.add_job("one", backoffLimit=1, trainer={"pace": 1})
    for launch in (1, 2):
        await simulation.until(
            lambda launch=launch: bool(simulation.pods("one")) and simulation.status("one").launches == launch
        )
        end_pod(simulation.world, NAMESPACE, f"one-{launch}-0", ExitCode.ERROR)
    await simulation.until(lambda: simulation.state("one") == "Failed")
    failed = simulation.condition("one", "Failed")
    assert failed.reason == JobReason.BACKOFF_LIMIT_EXCEEDED
    assert simulation.pods("one") == []


@pytest.mark.parametrize(
    ("codes", "evicted", "limit", "restarts"),
    [
        ((42, ExitCode.PEER_LOST), False, 3, {Cause.USER_ERROR: 1}),
        ((43, ExitCode.PEER_LOST), False, 0, {Cause.POD_LOST: 1}),
        ((42, ExitCode.ERROR), True, 1, {Cause.USER_ERROR: 1}),
    ],
    ids=["failOn", "ignore", "failOn, of a pod that the cluster has evicted"],
)
async def test_exit_codes_end_the_job_or_do_not_count_as_it_says(codes, evicted, limit, restarts):
    """One ends it, though it has tries left; another launches it again, though it has none."""
    simulation = fast_and_slow()
    policy = {"failOn": [42], "ignore": [43]}
    await simulation.run_job("one", backoffLimit=limit, failurePolicy=policy, trainer={"pace": 5})
    if evicted:
        told = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        simulation.world.patch(POD, NAMESPACE, "one-1-0", {"status": {"conditions": [told]}})
    for rank, code in enumerate(codes):
        end_pod(simulation.world, NAMESPACE, f"one-1-{rank}", code)
    await simulation.until(lambda: simulation.state("one") in ("Failed", "Succeeded"))
    status, failed = simulation.status("one"), simulation.condition("one", "Failed")
    assert status.restarts == restarts
    if limit == 3:
        assert (status.launches, failed.reason) == (1, JobReason.FAILURE_POLICY)
        assert "failurePolicy.failOn: pod one-1-0 ended with exit code 42" in failed.message
    else:
        assert (status.launches, failed) == (2, None)


async def test_a_killed_rank_restarts_the_gang_without_counting_toward_the_limit():
    """SIGKILL from outside (137) is not the job's error."""
    simulation = fast_and_slow()
    simulation.add_job("one", backoffLimit=0, trainer={"pace": 5})
    await simulation.until(lambda: simulation.trainers["one"].step >= 30)
    end_pod(simulation.world, NAMESPACE, "one-1-1", 137)
    end_pod(simulation.world, NAMESPACE, "one-1-0", ExitCode.PEER_LOST)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").restarts == {Cause.POD_LOST: 1}


@pytest.mark.parametrize(
    ("reason", "boot", "state", "cause"),
    [
        ("Unknown", "1", "Succeeded", Cause.POD_LOST),
        ("Error", "2", "Succeeded", Cause.POD_LOST),
        ("Error", "1", "Failed", Cause.USER_ERROR),
    ],
    ids=["its node restarted, by containerd", "its node restarted, by CRI-O", "it exits with 255 itself"],
)
async def test_only_an_exit_of_its_own_with_255_counts_toward_the_limit(reason, boot, state, cause):
    """A runtime gives 255 also to what ran when its node restarted."""
    simulation = fast_and_slow()
    simulation.add_job("one", backoffLimit=0, trainer={"pace": 5})
    await simulation.until(lambda: simulation.trainers["one"].step >= 30)
    node = simulation.world.get(POD, NAMESPACE, "one-1-1")["spec"]["nodeName"]
    simulation.world.patch(NODE, "", node, {"status": {"nodeInfo": {"bootID": boot}}})
    await simulation.tick()
    end_pod(simulation.world, NAMESPACE, "one-1-1", 255, reason=reason)
    await simulation.until(lambda: simulation.state("one") in ("Succeeded", "Failed"))
    assert simulation.state("one") == state
    assert simulation.status("one").restarts == {cause: 1}


async def test_a_lost_node_sends_the_job_elsewhere():
    """The node's pods never end by themselves; the job continues on other nodes."""
    simulation = fast_and_slow()
    await simulation.run_job("one", gpuTypes=["fast", "slow"])
    lost = simulation.status("one").allocation.nodes[0]
    simulation.set_node_ready(lost, False)
    simulation.trainers["one"].silent = True
    await simulation.until(lambda: bool(simulation.status("one").restarts), seconds=5.0)
    assert simulation.status("one").restarts == {Cause.NODE_LOST: 1}
    simulation.trainers["one"].silent = False
    await simulation.running("one", seconds=5.0)
    assert lost not in simulation.status("one").allocation.nodes
    await simulation.until(lambda: simulation.state("one") == "Succeeded", seconds=5.0)


async def test_suspending_saves_and_stops_and_resuming_continues():
    """The trainer is asked to save first; nothing is held while suspended; no step is lost."""
    simulation = fast_and_slow()
    simulation.add_job("one", trainer={"pace": 5})
    await simulation.until(lambda: simulation.trainers["one"].step >= 30)
    await simulation.suspended("one")
    stopped_at = simulation.trainers["one"].saved
    assert simulation.pods("one") == [] and simulation.status("one").allocation is None
    await simulation.tick()
    assert (simulation.policy()["status"]["jobsWaiting"], simulation.state("one")) == (0, "Suspended")
    simulation.change("one", suspend=False)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.trainers["one"].resumed_from == [0, stopped_at]
    assert not simulation.status("one").restarts


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", ["pause", "save", "answer"])
async def test_a_clock_that_was_wrong_holds_no_job_and_no_gpus(waits_for):
    """A pause, the time to save and the time to answer a plan, written by a clock that was a day ahead.

    The next operator's clock is right, or the same one has been set.
    """
    simulation = fast_and_slow()
    simulation.ahead = datetime.timedelta(days=1)
    simulation.add_job("one", totalSteps=10_000, trainer={"shrink_at": 50, "saves": waits_for != "save"})
    trainer = simulation.trainers["one"]
    await simulation.until(lambda: trainer.step >= 40)
    if waits_for == "pause":
        end_pod(simulation.world, NAMESPACE, "one-1-1", 137)
        end_pod(simulation.world, NAMESPACE, "one-1-0", ExitCode.PEER_LOST)
        await simulation.until(lambda: simulation.status("one").next_launch_at is not None)
    elif waits_for == "save":
        simulation.change("one", suspend=True)
        await simulation.until(lambda: simulation.state("one") == "Stopping")
    else:
        trainer.deaf = True
        await simulation.until(lambda: simulation.state("one") == "Repacking")
    simulation.ahead = datetime.timedelta()
    if waits_for == "save":
        await simulation.until(lambda: simulation.state("one") == "Suspended")
    else:
        await simulation.until(lambda: simulation.status("one").launches == 2)
        trainer.deaf = False
        await simulation.running("one")


async def test_gpus_of_a_job_that_is_being_deleted_wait_for_no_finalizer_of_somebody_else():
    """Its pods are deleted, its cost is summed up, and another job starts there; its finalizer stays."""
    simulation = fast_and_slow()
    await simulation.run_job("one", gpuTypes=["fast"], totalSteps=10_000)
    await simulation.ticks(10)
    deleted = {"finalizers": ["example.com/never"], "deletionTimestamp": show(simulation.now)}
    simulation.world.patch(JOB, NAMESPACE, "one", {"metadata": deleted})
    simulation.add_job("two", gpuTypes=["fast"])
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    status = simulation.status("one")
    assert status.allocation is None and status.condition("Running").reason == "Finished"
    assert sum(pool.gpu_seconds for pool in status.pool_costs) >= 20


async def test_a_job_that_a_finalizer_keeps_holds_only_the_gpus_of_its_pods_that_are_left():
    """One pod does not end: the other one's GPU serves another job, and is paid no more."""
    simulation = fast_and_slow()
    await simulation.run_job("one", gpuTypes=["fast"], totalSteps=10_000)
    first, second = simulation.pods("one")
    simulation.trainers["one"].silent = True
    deleted = {"finalizers": ["example.com/never"], "deletionTimestamp": show(simulation.now)}
    simulation.world.patch(JOB, NAMESPACE, "one", {"metadata": deleted})
    end_pod(simulation.world, NAMESPACE, first["metadata"]["name"], ExitCode.OK)
    stays = {"deletionTimestamp": show(simulation.now + datetime.timedelta(hours=1))}
    simulation.world.patch(POD, NAMESPACE, second["metadata"]["name"], {"metadata": stays})
    await simulation.run_job("two", gpuTypes=["fast"], stages=(1, 1))
    assert len(simulation.pods("one")) == 1 and simulation.status("one").allocation.ended == (
        first["metadata"]["name"],
    )


async def test_a_suspended_gang_that_never_started_has_nothing_to_save():
    """Its pods are deleted at once, and no plan asks them to save."""
    simulation = fast_and_slow()
    simulation.add_job("one", trainer={"silent": True})
    await simulation.until(
        lambda: (
            (running := simulation.condition("one", "Running")) is not None
            and running.reason == JobReason.RANKS_MEETING
        )
    )
    simulation.change("one", suspend=True)
    await simulation.until(lambda: all("deletionTimestamp" in p["metadata"] for p in simulation.pods("one")))
    assert simulation.plan("one").directive is Directive.RUN
    await simulation.until(lambda: simulation.state("one") == "Suspended")


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
async def test_an_end_that_somebody_writes_by_hand_holds_no_gpus_for_ever(end):
    """The gang trains on, and what was written is replaced; the job ends by itself."""
    simulation = fast_and_slow()
    await simulation.run_job("one")
    item = simulation.world.get(JOB, NAMESPACE, "one")
    written = {"type": end, "status": "True", "reason": "ByHand", "message": ""}
    written["lastTransitionTime"] = item["metadata"]["creationTimestamp"]
    status = {**item["status"], "conditions": [*item["status"]["conditions"], written]}
    simulation.world.put(JOB, {**item, "status": status})
    await simulation.until(lambda: simulation.status("one").allocation is None)
    ends = {kind: simulation.condition("one", kind) for kind in ("Succeeded", "Failed")}
    assert simulation.state("one") == "Succeeded" and ends["Failed"] is None
    assert ends["Succeeded"].reason != "ByHand"


@pytest.mark.slow
async def test_two_jobs_take_turns_on_one_gpu():
    """Rounds: the running gang saves, stops, and its successor starts on the freed GPU only then."""
    simulation = Simulation(nodes={"a": ("fast", 1)}, roundSeconds=20, moves={"maxMovesPerHour": 100})
    for name in ("one", "two"):
        simulation.add_job(name, stages=(1, 1), totalSteps=600)
    await simulation.reached("Succeeded", "one", "two", ticks=600)
    restarts = [simulation.status(name).restarts.get(Cause.PREEMPTED, 0) for name in ("one", "two")]
    assert min(restarts) >= 1
    for name in ("one", "two"):
        assert simulation.condition(name, "Preempted").reason == JobReason.RESUMED


async def test_a_shrink_and_a_completion_without_an_operator_are_both_recorded():
    """The successor finds the job done: it releases and records the repack, then the success."""
    simulation = Simulation(nodes={"a": ("fast", 2)})
    simulation.add_job("one", trainer={"shrink_at": 30})
    await simulation.until(lambda: simulation.state("one") == "Repacking")
    await simulation.ticks(30, operator=False)
    simulation.start_operator()
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    (repack,) = simulation.status("one").repacks
    assert repack.released_pods == ("one-1-1",)
    assert not simulation.status("one").restarts


async def test_a_finished_job_is_deleted_after_its_time_to_live():
    """ttlSecondsAfterFinished 30: there at 20 s, gone after 40 s, with all it owned."""
    simulation = fast_and_slow()
    simulation.add_job("one", ttlSecondsAfterFinished=30)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    await simulation.tick(seconds=20)
    assert simulation.keys() == [(NAMESPACE, "one")]
    await simulation.tick(seconds=20)
    assert simulation.keys() == []


async def test_an_allocator_that_is_cancelled_as_something_changes_ends():
    """An operator that is told to end does so, however busy it is."""
    simulation = fast_and_slow(roundSeconds=600)
    await simulation.tick()
    allocator = simulation.allocator
    allocating = asyncio.create_task(allocator.run())
    for _ in range(3):
        await asyncio.sleep(0)
    allocator.throttle.request()
    allocating.cancel()
    done, _ = await asyncio.wait([allocating], timeout=WAIT_SECONDS)
    assert done and allocating.cancelled()


async def test_a_decision_on_a_job_is_not_carried_out_for_another_of_its_name():
    """Deleted and made again before its launch: the new job waits until it is decided on."""
    simulation = fast_and_slow()
    simulation.add_job("one")
    await simulation.look()
    await simulation.decide()
    simulation.world.drop(JOB, NAMESPACE, "one")
    simulation.add_job("one")
    await simulation.look()
    await simulation.reconciler.reconcile((NAMESPACE, "one"))
    assert simulation.status("one").allocation is None
    await simulation.running("one")


async def test_a_sidecar_that_never_ends_keeps_no_job_from_its_end() -> None:
    """Whether the trainer is done or fails by its own fault: then its pods are deleted."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    with_sidecar = {"template": template({"name": "proxy", "image": "proxy:1"})}
    simulation.add_job("done", **with_sidecar)
    await simulation.run_job("wrong", totalSteps=1_000_000, backoffLimit=0, **with_sidecar)
    said = TerminationMessage(reason=ExitReason.FAILED, message="no")
    end_pod(simulation.world, NAMESPACE, "wrong-1-1", 1, said)
    await simulation.until(lambda: simulation.state("wrong") == "Failed")
    failed = simulation.condition("wrong", "Failed")
    assert failed is not None and failed.reason == "BackoffLimitExceeded"
    await simulation.until(lambda: simulation.state("done") == "Succeeded")
    await simulation.until(lambda: not simulation.pods("done") + simulation.pods("wrong"))


async def test_ranks_that_exit_with_success_before_the_last_step_of_their_launch_have_failed():
    """Whatever step they name as the last: restarts that do not count would have no end."""
    simulation = fast_and_slow()
    await simulation.run_job("one", totalSteps=10_000, backoffLimit=0)
    said = {"metadata": {"annotations": {FINISHED_ANNOTATION: "40"}}}
    simulation.world.patch(LEASE, NAMESPACE, "one", said)
    for pod in simulation.plan("one").pods:
        end_pod(simulation.world, NAMESPACE, pod, ExitCode.OK)
    await simulation.until(lambda: simulation.state("one") == "Failed")
    assert simulation.status("one").restarts == {Cause.USER_ERROR: 1}


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("total", [200, 100], ids=["raised", "raised, and lowered again"])
async def test_a_job_that_gets_more_steps_while_it_trains_goes_on_after_its_former_last_step(
    total, rewritten
):
    """That is no failure of the job, which may have no try left; its plan may be written anew meanwhile."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=60)
    await simulation.run_job("one", totalSteps=100, backoffLimit=0)
    simulation.world.patch(NODE, "", "a", {"spec": {"unschedulable": True}})  # the next launch has to wait
    simulation.change("one", totalSteps=200)
    if rewritten:
        await simulation.ticks(2)
        simulation.world.drop(CONFIG_MAP, NAMESPACE, plan_config_map_name("one"))
    await simulation.until(lambda: simulation.status("one").allocation is None)
    simulation.change("one", totalSteps=total)
    simulation.trainers["one"].total = total
    simulation.world.patch(NODE, "", "a", {"spec": {"unschedulable": False}})
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    status = simulation.status("one")
    assert (status.progress.step, status.restarts) == (total, {"StepsAdded": 1})
