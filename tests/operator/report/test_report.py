"""What ``ballast explain`` and ``ballast top`` make of objects."""

import datetime
import json

from ballast_operator.api.conditions import NO_POLICY
from ballast_operator.cli.live.explain import as_text
from ballast_operator.report.costs import costs
from ballast_operator.report.explanation import explanation
from ballast_operator.report.overview import overview


def condition(kind: str, status: str, reason: str, message: str) -> dict:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def job(**status) -> dict:
    metadata = {"name": "one", "namespace": "team", "uid": "u"}
    return {"metadata": metadata, "spec": {"totalSteps": 100}, "status": status}


def test_a_waiting_job_is_explained_by_its_refusal():
    """The answer is the condition's sentence, the reason its stable word."""
    waits = job(
        state="Waiting",
        conditions=[condition("Admitted", "False", "WaitingForCapacity", "waits for 2 GPUs: 0 of 4 free")],
        lastDecision={"nextBest": "2 x k80: 1 steps/s"},
    )
    found = explanation(waits, [], [], [])
    assert (found.reason, found.answer) == ("WaitingForCapacity", "waits for 2 GPUs: 0 of 4 free")
    text = as_text(found)
    assert "team/one: Waiting (WaitingForCapacity)" in text
    assert "second   2 x k80: 1 steps/s" in text
    assert "there is no ClusterPolicy" in text


def test_what_was_chosen_is_told_once():
    """Also where the reason begins with it, as that of a gang in several pools does."""
    for why, want in (
        ("2 x v100: they were free", "  chosen   2 x v100: they were free"),
        ("they were free", "  chosen   2 x v100: they were free"),
    ):
        runs = job(state="Running", lastDecision={"chosen": "2 x v100", "why": why})
        assert want in as_text(explanation(runs, [], [], [])).splitlines()


def test_what_keeps_a_job_waiting_is_told_once():
    """The policy's line is left out where it is the answer."""
    waits = job(state="Waiting", conditions=[condition("Admitted", "False", "WaitingForPolicy", NO_POLICY)])
    assert as_text(explanation(waits, [], [], [])).count(NO_POLICY) == 1


def test_a_job_that_starts_says_both_where_and_what_it_waits_for():
    """Admitted, and not running yet."""
    starts = job(
        state="Starting",
        conditions=[
            condition("Admitted", "True", "Assigned", "2 x v100 of pool fast"),
            condition("Running", "False", "PodsStarting", "1 of 2 pods run"),
        ],
    )
    assert explanation(starts, [], [], []).answer == "2 x v100 of pool fast; not running yet: 1 of 2 pods run"


def test_explain_prints_no_escape_sequence_of_a_trainer():
    """Its answer is the trainer's own message, and so are events."""
    said = condition("Failed", "True", "UserError", "pod a ended: \x1b[2J")
    event = {"metadata": {"name": "e"}, "reason": "UserError", "message": "\x1b[31m"}
    text = as_text(explanation(job(state="Failed", conditions=[said]), [], [], [event]))
    assert "pod a ended" in text and "event    UserError" in text and "\x1b" not in text


def test_a_job_that_no_operator_has_seen_says_so():
    """Without an operator the answer names it."""
    assert "see that ballast operator runs" in explanation(job(), [], [], []).answer


def test_a_job_of_another_controller_is_in_no_table_and_explained_as_that():
    """As on the page, whatever its controller has written into the status."""
    theirs = job(state="Running", costSoFar=5.0)
    theirs["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert overview([theirs], []).jobs == ()
    found = costs([theirs], [], now=datetime.datetime.now(datetime.UTC))
    assert (found.jobs, found.teams) == ((), ())
    assert "managedBy: kueue.x-k8s.io/multikueue has it" in explanation(theirs, [], [], []).answer


def test_the_overview_shows_pools_and_jobs_and_is_json():
    """The same numbers as the objects; emulated speed is marked."""
    policy = {
        "metadata": {"name": "p"},
        "status": {
            "capacity": [{"pool": "fast", "gpuType": "v100", "nodes": 2, "gpus": 4, "gpusHeld": 2}],
            "conditions": [condition("Ready", "True", "InForce", "rounds of 360 s")],
        },
    }
    runs = job(
        state="Running",
        allocation={"gpuType": "v100", "gpus": 2},
        progress={"step": 7, "stepsPerSecond": 2.0, "emulatedSlowdown": 6},
        restarts={"PodLost": 2},
        repacks=[{}],
        conditions=[condition("Admitted", "True", "Assigned", "...")],
        lastDecision={"why": "its share is 57 %"},
    )
    seen = overview([runs], [policy])
    (line,) = seen.jobs
    assert (line.step, line.total_steps, line.emulated, line.restarts, line.repacks) == (7, 100, True, 2, 1)
    assert line.why == "its share is 57 %"
    assert json.loads(seen.to_json())["pools"] == [
        {"pool": "fast", "gpu_type": "v100", "nodes": 2, "gpus": 4, "held": 2}
    ]


def test_a_spread_gang_is_told_with_its_nodes_by_explain_and_top():
    """Why it has its GPUs stays what the launch said; where it is now is the condition."""
    nodes = "it is on 3 nodes, 2 would hold it: 3.1 steps/s there, 4 on 2"
    conditions = [
        condition("Admitted", "True", "Assigned", "8 x v100 of pool fast"),
        condition("Running", "True", "AllRanksTrain", "8 ranks train"),
        condition("Consolidated", "False", "OnMoreNodes", nodes),
    ]
    decision = {"chosen": "8 x v100 of pool fast", "why": "they were free"}
    spread = job(state="Running", conditions=conditions, lastDecision=decision)
    found = explanation(spread, [], [], [])
    assert found.answer == f"they were free; {nodes}"
    assert nodes in as_text(found)
    assert overview([spread], []).jobs[0].why == f"they were free; {nodes}"
    together = job(state="Running", conditions=conditions[:2], lastDecision=decision)
    assert overview([together], []).jobs[0].why == "they were free"
