"""Ranks that are lost: the others keep their processes, and go on from the copies in memory."""

import functools
import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ballast_policies.contract.messages import (
    POD_RANKS_ENV,
    RANK_RESTARTS_ENV,
    RENDEZVOUS_PORT,
    Ack,
    Candidate,
    ExitCode,
)
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.loop.in_place import best_copies, who_goes_on

from tests.support.examples import first_daily
from tests.support.held_data import Gates
from tests.support.kills import struck
from tests.support.plans import local_plan
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes


@pytest.fixture
def small_config(small_config):
    """Of five layers: as many as four ranks need, and one that has several."""
    model = {**small_config()["model"], "layers": 5}
    return functools.partial(small_config, model=model)


@pytest.fixture
def local_ranks(gang):
    """``ballast-train run --ranks``: its process and what it prints."""
    return functools.partial(gang, local=True)


def steps(gang, *names):
    lines = itertools.chain.from_iterable(map(gang.lines, names))
    return [(line["step"], line["loss"]) for line in lines if "event" not in line]


def assert_undisturbed(gang, reference, every, *names):
    """Each step has the loss of one process, as often as it is done; no more are repeated than allowed.

    ``names``: of those that were rank 0, one after the other.
    """
    names = names or ("run",)
    done = steps(gang, *names)
    assert {step for step, _ in done} == set(reference)
    assert all(abs(loss - reference[step]) < 1e-5 for step, loss in done)
    resumed = 0
    for (before, _), (after, _) in itertools.pairwise(done):
        resumed += after != before + 1
        assert before - every < after <= before + 1
    assert resumed <= sum(len(gang.events("ranksLost", name)) for name in names)


def in_memory(config, every):
    return {**config, "checkpoint": {**config.get("checkpoint", {}), "inMemoryEverySteps": every}}


def test_ranks_go_on_in_place_whichever_is_killed(local_ranks, small_config, single_process_losses, tmp_path):
    """The middle, the first and the last stage, one after the other: the curve is that of one process."""
    config = in_memory(small_config(totalSteps=14), 1)
    reference = single_process_losses(small_config(totalSteps=14))
    strikes = [(3, 2, 0, "SIGKILL"), (7, 0, 0, "SIGKILL"), (11, 3, 0, "SIGKILL")]
    config["metrics"] = {"writer": f"{__name__}:Telling"}
    gang = local_ranks(struck(config, tmp_path / "strikes", *strikes), ranks=4).succeeded()
    assert_undisturbed(gang, reference, every=1)
    losses = gang.events("ranksLost", "run")
    # One that has started again, rank-2.1 say, and has just joined, has no copies to go on from.
    lost = [[name for name in event["lost"] if "." not in name] for event in losses]
    assert lost == [["rank-2"], ["rank-0"], ["rank-3"]]
    assert all(event["ranks_after"] == event["ranks_before"] - len(event["lost"]) for event in losses)
    assert all(event["seconds"] > 0 for event in losses)
    assert len(gang.events("launch", "run")) == 1
    assert gang.errors().count("a tracker's run begins") == 2, "once more where rank 0 is lost, and then only"


class Telling:
    """A writer that tells when its run begins."""

    def __init__(self):
        print("a tracker's run begins", file=sys.stderr, flush=True)

    def scalars(self, step, values):
        pass

    def event(self, name, step, fields):
        pass

    def close(self):
        pass


def with_experts(**fields):
    return [{"kind": "mixtureOfExperts", "experts": {"everyBlocks": 1, "balance": "none", **fields}}]


SGD = {"training": {"optimizer": "sgd", "learningRate": 0.05}}
"""Of Adam rounding errors would change who goes where."""
KILLED = {
    "layers": (3, {}, {}, (2, 3)),
    "experts of two replicas": (
        4,
        {**SGD, "dynamics": with_experts(parallel=True), "parallelism": {"data": 2}},
        {**SGD, "dynamics": with_experts()},
        (2, 4),
    ),
}


@pytest.mark.parametrize(("ranks", "fields", "alone", "grows"), KILLED.values(), ids=KILLED)
def test_a_killed_rank_is_started_again_and_joins(
    local_ranks, small_config, single_process_losses, tmp_path, ranks, fields, alone, grows
):
    """Under a new name, between two steps: the pipeline is as long as before, the curve is the same."""
    gates = Gates(tmp_path / "gates", 6)
    config = gates.hold(in_memory(small_config(totalSteps=10, **fields), 1))
    gang = local_ranks(struck(config, tmp_path / "strikes", (3, 0, 0, "SIGKILL")), ranks=ranks)
    eventually(lambda: "rank-0.1 waits to be called" in gang.errors(), "it is back", gang.errors)
    gates.open()
    gang.succeeded()
    (grown,) = gang.events("grow", "run")
    assert (grown["ranks_before"], grown["ranks_after"]) == grows
    assert_undisturbed(gang, single_process_losses(small_config(totalSteps=10, **alone)), every=1)


@pytest.mark.parametrize(
    ("schedule", "layers"), first_daily([("ZeroBubbleV", (1, 1, 1, 2)), ("1F1B", (1, 4))], 2)
)
def test_pods_go_on_that_try_a_plan(pods, small_config, single_process_losses, tmp_path, schedule, layers):
    """By the launch's schedule, whichever they tried, and try the plans anew: the first one first."""
    plans = tuple(
        Candidate(schedule=name, layers=of, step_seconds=1.0)
        for name, of in (("1F1B", (2, 3)), (schedule, layers))
    )
    config = struck(in_memory(small_config(totalSteps=13), 1), tmp_path / "strikes", (7, 1, 0, "SIGKILL"))
    start_in_pods(pods, tmp_path / "channel", config, 2, candidates=plans)
    assert set(pods.exit_codes().values()) == {0}, pods.errors()
    (lost,) = pods.events("ranksLost", "job-1-0")
    assert_undisturbed(pods, single_process_losses(small_config(totalSteps=13)), 1, "job-1-0")
    steps = [line for line in pods.lines("job-1-0") if "event" not in line]
    sizes = {line["step"]: [one["endLayer"] - one["firstLayer"] for one in line["stages"]] for line in steps}
    again = lost["resumed_from_step"] + 1
    assert [tuple(sizes[again + step]) for step in range(6)] == [(2, 3)] * 5 + [layers]


@pytest.mark.parametrize("copying", first_daily([False, True]))
def test_a_rank_goes_on_that_has_a_half_of_a_message(
    local_ranks, small_config, single_process_losses, copying
):
    """Of the one that is killed: it waits for the rest, in a step or for a copy, and nothing wakes it."""
    model = {"name": "gpt", "layers": 4, "args": {"dim": 128, "heads": 2, "context": 256}}
    config = in_memory(small_config(totalSteps=6, model=model), 1)
    args = {"at": 3, "rank": 1, "copying": copying}
    config["callback"] = {"name": "tests.support.kills:break_off", "everyRank": True, "args": args}
    gang = local_ranks(config, ranks=3).succeeded()
    assert [event["lost"] for event in gang.events("ranksLost", "run")] == [["rank-1"]]
    assert_undisturbed(gang, single_process_losses(small_config(totalSteps=6, model=model)), every=1)


def test_neighbours_lost_at_once_go_back_to_the_checkpoint(
    local_ranks, small_config, single_process_losses, tmp_path
):
    """The copies of one of them are lost, too; ranks that are left say so, and read what is on disk."""
    config = small_config(
        totalSteps=16, checkpoint={"path": str(tmp_path / "saved"), "everySteps": 4, "asyncMode": "disabled"}
    )
    reference = single_process_losses(small_config(totalSteps=16))
    strikes = [(10, 1, 0, "SIGKILL"), (10, 2, 0, "SIGKILL")]
    gang = local_ranks(struck(in_memory(config, 1), tmp_path / "strikes", *strikes), ranks=4).succeeded()
    assert_undisturbed(gang, reference, every=4)
    assert "going back to the newest checkpoint" in gang.errors()
    assert [event["resumed_from_step"] for event in gang.events("ranksLost", "run")] == [8]


def test_without_a_copy_or_a_checkpoint_the_job_ends(local_ranks, small_config, tmp_path):
    """Two of two positions that hold each other's copies: the reason is told."""
    strikes = [(6, 0, 0, "SIGKILL"), (6, 1, 0, "SIGKILL")]
    config = in_memory(small_config(totalSteps=1000), 2)
    gang = local_ranks(struck(config, tmp_path / "strikes", *strikes), ranks=3)
    assert gang.exit_codes() == {"run": 128 + 9}, gang.errors()
    assert "without checkpoint.path nothing is saved" in gang.errors()


def test_an_error_of_the_jobs_own_ends_all_ranks(local_ranks, small_config, tmp_path):
    """The others would meet it, too."""
    config = in_memory(small_config(totalSteps=1000), 1)
    config["callback"] = {"name": "builtins:print", "args": {"no_such_argument": 1}}
    gang = local_ranks(config, ranks=3)
    assert gang.exit_codes() == {"run": ExitCode.ERROR}, gang.errors()
    assert not gang.events("ranksLost", "run")


@pytest.mark.parametrize(
    ("pod", "planned"), first_daily([(0, "later"), (1, "first"), (0, "first"), (2, "later")])
)
def test_a_gang_goes_on_in_place_without_a_pod_that_is_lost_and_grows_again(
    pods, small_config, single_process_losses, tmp_path, pod, planned
):
    """By the operator's plan without it: the others keep their processes, and its layers come from a copy.

    Without the first, which serves the store and is rank 0, they meet at the next one's, which reports. It is
    killed between two steps: a line that it has not passed on yet would be lost.
    """
    leader = f"job-1-{0 if pod else 1}"
    gates = Gates(tmp_path / "gates", 5, 12)
    config = gates.hold(in_memory(small_config(totalSteps=20), 1))
    channel = start_in_pods(pods, tmp_path / "channel", config, 3)
    pods.wait_for_step(5, "job-1-0")
    pods.signal(f"job-1-{pod}", signal.SIGKILL)
    pods.exit_code(f"job-1-{pod}")
    plan = channel.read_plan()
    smaller = plan.keep([name for name in plan.pods if name != f"job-1-{pod}"], "a pod is lost")
    if planned == "first":
        channel.publish(smaller)
    gates.open()
    if planned == "later":
        eventually(lambda: "agree on how to go on" in pods.errors(), "the loss to be noticed", pods.errors)
        channel.publish(smaller)
    pods.wait_for_step(11, leader)
    (lost,) = pods.events("ranksLost", leader)
    assert (lost["lost"], lost["ranks_before"], lost["ranks_after"]) == ([f"job-1-{pod}"], 3, 2)
    assert lost["epoch"] == smaller.epoch
    acknowledged(tmp_path / "channel", smaller.epoch)
    (new,) = local_plan(["job-1-3"], network=1).ranks
    grown = smaller.grow([new.replace(rank=2)], "the pod is back")
    channel.publish(grown)
    pods.start_pod("job-1-3", tmp_path / "channel", {RANK_RESTARTS_ENV: "3", "BALLAST_POD_IP": new.address})
    eventually(lambda: "job-1-3 waits to be called" in pods.errors(), "it is back", pods.errors)
    gates.open()
    codes = pods.exit_codes()
    assert codes.pop(f"job-1-{pod}") == -signal.SIGKILL
    assert set(codes.values()) == {0}, pods.errors()
    assert [event["ranks_after"] for event in pods.events("grow", leader)] == [3]
    reference = single_process_losses(small_config(totalSteps=20))
    assert_undisturbed(pods, reference, 1, *dict.fromkeys(["job-1-0", leader]))


@pytest.mark.parametrize("pod", first_daily([1, 0]))
def test_a_gang_goes_on_without_a_pod_that_does_not_answer(
    pods, small_config, single_process_losses, tmp_path, pod
):
    """Its node is gone, without an end of its connections: its silence is noticed, and that of its store."""
    leader = f"job-1-{0 if pod else 1}"
    gates = Gates(tmp_path / "gates", 5)
    config = gates.hold(in_memory(small_config(totalSteps=10), 1))
    channel = start_in_pods(pods, tmp_path / "channel", config, 3)
    pods.wait_for_step(5, "job-1-0")
    silent = stop_with_children(pods.processes[f"job-1-{pod}"].pid)
    try:
        plan = channel.read_plan()
        channel.publish(plan.keep([name for name in plan.pods if name != f"job-1-{pod}"], "a node is lost"))
        gates.open()
        for name in {"job-1-0", "job-1-1", "job-1-2"} - {f"job-1-{pod}"}:
            assert pods.exit_code(name) == 0, pods.errors()
    finally:
        # Children first: the kernel kills them with their parent, and another one reaps them.
        for process in reversed(silent):
            os.kill(process, signal.SIGKILL)
    assert [event["lost"] for event in pods.events("ranksLost", leader)] == [[f"job-1-{pod}"]]
    reference = single_process_losses(small_config(totalSteps=10))
    assert_undisturbed(pods, reference, 1, *dict.fromkeys(["job-1-0", leader]))


@pytest.mark.nightly
def test_a_gang_goes_on_without_a_second_pod_that_is_lost_meanwhile(
    pods, small_config, single_process_losses, tmp_path
):
    """The first one: those that have read the plan without the other pod go on by the one without both."""
    gates = Gates(tmp_path / "gates", 5)
    config = gates.hold(in_memory(small_config(totalSteps=10), 1))
    channel = start_in_pods(pods, tmp_path / "channel", config, 4)
    pods.wait_for_step(5, "job-1-0")
    for pod in ("job-1-2", "job-1-0"):
        pods.signal(pod, signal.SIGKILL)
        pods.exit_code(pod)
    smaller = channel.read_plan().keep(["job-1-0", "job-1-1", "job-1-3"], "a pod is lost")
    channel.publish(smaller)
    gates.open()
    eventually(lambda: pods.errors().count("meet at another one") == 2, "that to be noticed", pods.errors)
    channel.publish(smaller.keep(["job-1-1", "job-1-3"], "another one is lost"))
    for pod in ("job-1-1", "job-1-3"):
        assert pods.exit_code(pod) == 0, pods.errors()
    (lost,) = pods.events("ranksLost", "job-1-1")
    assert (lost["lost"], lost["ranks_before"], lost["ranks_after"]) == (["job-1-0", "job-1-2"], 4, 2)
    reference = single_process_losses(small_config(totalSteps=10))
    assert_undisturbed(pods, reference, 1, "job-1-0", "job-1-1")


@pytest.mark.nightly
def test_a_rank_goes_on_that_waits_for_others_at_a_second_store_whose_pod_does_not_answer(
    pods, small_config, single_process_losses, tmp_path
):
    """Its silence is noticed there as at the first one's; the checkpoint has what the copies have no more."""
    gates = Gates(tmp_path / "gates", 5)
    saved = small_config(totalSteps=10, checkpoint={"path": str(tmp_path / "saved"), "everySteps": 2})
    channel = start_in_pods(pods, tmp_path / "channel", gates.hold(in_memory(saved, 1)), 4)
    pods.wait_for_step(5, "job-1-0")
    for pod in ("job-1-2", "job-1-0"):
        pods.signal(pod, signal.SIGKILL)
        pods.exit_code(pod)
    smaller = channel.read_plan().keep(["job-1-1", "job-1-2", "job-1-3"], "a pod is lost")
    channel.publish(smaller)
    gates.open()
    eventually(lambda: pods.errors().count("meet at another one") == 2, "that to be noticed", pods.errors)
    store = dist.TCPStore(smaller.ranks[0].address, RENDEZVOUS_PORT, is_master=False)
    eventually(lambda: store.check(["survivors/1/here/job-1-3"]), "it to be there", pods.errors)
    silent = stop_with_children(pods.processes["job-1-1"].pid)
    try:
        channel.publish(smaller.keep(["job-1-3"], "all others are lost"))
        assert pods.exit_code("job-1-3") == 0, pods.errors()
    finally:
        for process in reversed(silent):
            os.kill(process, signal.SIGKILL)
    done = steps(pods, "job-1-3")
    reference = single_process_losses(small_config(totalSteps=10))
    assert done[-1][0] == 10 and all(abs(loss - reference[step]) < 1e-5 for step, loss in done)


def stop_with_children(pid):
    """All processes of a pod, parents first: none of them starts another one any more."""
    os.kill(pid, signal.SIGSTOP)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *itertools.chain.from_iterable(stop_with_children(int(child)) for child in children)]


def acknowledged(folder, epoch):
    def is_told():
        text = (folder / "ack.json").read_text()
        return Ack.from_json(text).epoch == epoch

    eventually(is_told, f"epoch {epoch} to be acknowledged")


def start_in_pods(pods, folder, config, count, per_pod=1, **fields):
    """Pods as the operator makes them where their ranks go on in place; ``fields``: of the plan."""
    plan = local_plan([f"job-1-{number}" for number in range(count)], network=1, ranks_per_pod=per_pod)
    plan = plan.replace(**fields)
    channel = DirectoryChannel(folder)
    channel.publish(plan)
    (folder / "config.json").write_text(json.dumps(config))
    for one in plan.ranks[::per_pod]:
        variables = {RANK_RESTARTS_ENV: "3", POD_RANKS_ENV: str(per_pod), "BALLAST_POD_IP": one.address}
        pods.start_pod(one.pod, folder, {**variables, "FIRST_RANK": str(one.rank)})
    return channel


def test_copies_in_memory_are_refused_where_ranks_do_not_go_on(gang, small_config):
    """Under torchrun or in a pod the field would have no effect."""
    refused = gang(in_memory(small_config(), 1), ranks=2)
    assert refused.exit_code("rank-0") == ExitCode.USAGE
    assert "checkpoint.inMemoryEverySteps: 1, and ranks go on in place under" in refused.errors()


def test_one_rank_alone_says_that_it_has_nobody_to_copy_to(local_ranks, small_config):
    gang = local_ranks(in_memory(small_config(totalSteps=1), 1), ranks=1).succeeded()
    assert "checkpoint.inMemoryEverySteps has no effect: one rank has no other" in gang.errors()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_pods_go_on_after_kills_of_their_ranks_at_any_time(
    pods, small_config, single_process_losses, tmp_path, seed
):
    """During steps, copies, and as the others agree or meet; two at once go back to the checkpoint.

    Pods live on, and so do the others' processes; the plan is the one that the operator wrote.
    """
    draw = random.Random(seed)
    total, every, per_pod = 40, draw.choice([1, 1, 3]), draw.choice([1, 1, 2])
    fields = {"totalSteps": total, "pipeline": {"microbatches": 8, "globalBatchSize": 8}}
    saving = {"path": str(tmp_path / "saved"), "everySteps": 3}
    shape = {"parallelism": {"gpusPerPod": per_pod}} if per_pod > 1 else {}
    config = in_memory(small_config(**fields, **shape, checkpoint=saving), every)
    strikes = [
        (step, rank, draw.choice([0, *range(400)]), "SIGKILL")
        for step, rank in zip(
            sorted(draw.sample(range(2, total - 4), 3)), draw.choices(range(4), k=3), strict=True
        )
    ]
    start_in_pods(
        pods, tmp_path / "channel", struck(config, tmp_path / "strikes", *strikes), 4 // per_pod, per_pod
    )
    assert set(pods.exit_codes().values()) == {0}, f"{strikes} {pods.errors()}"
    back = "going back to the newest checkpoint" in pods.errors()
    reference = single_process_losses(small_config(**fields))
    assert_undisturbed(pods, reference, total if back else every, "job-1-0")


def test_the_newest_copies_of_which_all_parts_are_left_count():
    """Some ranks have the newer ones already, others those of before alone."""
    old, new = [4, 1, 3], [5, 1, 3]
    assert best_copies([[[*new, [0, 2]], [*old, [0, 2]]], [[*new, [1, 0]], [*old, [1, 0]]]]) == [5, 1]
    assert best_copies([[[*new, [0, 2]], [*old, [0, 2]]], [[*old, [1, 0]]]]) == [4, 1]
    assert best_copies([[[*new, [0, 2]]], [[*old, [1, 0]]]]) is None


def test_each_rank_that_goes_on_has_some_of_the_copies():
    """Those that all have count before newer ones; a rank that has just joined has none, and starts again."""
    plan = local_plan(["job-0", "job-1", "job-2", "job-3"])
    old, new, grown = [4, 1, 4], [5, 1, 4], [5, 2, 3]
    both = {
        "job-0": [[*old, [0, 3]]],
        "job-1": [[*old, [1, 0]], [*new, [1, 0]]],
        "job-3": [[*old, [3, 2]], [*new, [3, 2]]],
    }
    assert who_goes_on(plan, both, 1) == ([*both], [4, 1])
    joined = {"job-0": [[*grown, [0, 2]]], "job-1": [[*grown, [1, 0]]], "job-3": []}
    assert who_goes_on(plan, joined, 1) == (["job-0", "job-1"], [5, 2])
    assert who_goes_on(plan, {"job-0": joined["job-0"], "job-3": []}, 1) == (["job-0", "job-3"], None)
