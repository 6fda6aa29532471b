"""The demo's story and summary come from watch events alone."""

import json

import pytest
from ballast_operator.demo.report import compare_with_agnostic, render, render_summary, summarise
from ballast_operator.demo.story import Story
from ballast_policies.contract.messages import JOB_LABEL, REPORT_ANNOTATION, Report
from rich.console import Console


def node(name, gpus, pool="v100"):
    labels = {"ballast.dev/pool": pool}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
    }


def pod(name, job, node_name="n0", phase="Running", uid=None, restarts=0):
    return {
        "metadata": {"name": name, "uid": uid or f"uid-{name}", "labels": {JOB_LABEL: job}},
        "spec": {
            "nodeName": node_name,
            "containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        },
        "status": {"phase": phase, "containerStatuses": [{"restartCount": restarts}]},
    }


def job(name, state, **status):
    return {"metadata": {"name": name}, "spec": {"totalSteps": 10}, "status": {"state": state, **status}}


def lease(name, **fields):
    report = Report(**({"epoch": 1, "step": 1, "loss": 5.0, "steps_per_second": 2.0} | fields))
    return {"metadata": {"name": name, "annotations": {REPORT_ANNOTATION: report.to_json()}}}


class Tale:
    """Tells a story event by event."""

    def __init__(self):
        self.story = Story()
        self.story.see_node(node("n0", 2))

    def pod(self, at, *args, deleted=False, **kwargs):
        self.story.see_pod(at, pod(*args, **kwargs), deleted=deleted)


@pytest.fixture
def shrunk():
    """Job a repacks from two pods to one at 5 s; job b, which came at 2 s, starts on the freed GPU."""
    tale = Tale()
    tale.story.see_job(0, job("a", "Running"))
    tale.pod(0, "a-1-0", "a")
    tale.pod(0, "a-1-1", "a")
    tale.story.see_lease(1, lease("a"))
    tale.story.see_job(2, job("b", "Waiting", lastDecision={"why": "0 of 2 free"}))
    tale.story.see_job(4, job("a", "Repacking"))
    tale.pod(5, "a-1-1", "a", deleted=True)
    repack = {
        "releasedPods": ["a-1-1"],
        "survivors": [{"name": "a-1-0", "uid": "uid-a-1-0"}],
        "pauseMs": 50.0,
    }
    tale.story.see_job(5, job("a", "Running", repacks=[repack], restarts={}))
    tale.pod(6, "b-1-0", "b")
    tale.story.see_lease(8.5, lease("b"))
    return tale


def summary_of(tale):
    return summarise(tale.story)


def test_the_repack_names_who_went_and_who_stayed(shrunk):
    """Survivors have one UID each over the whole story, and no container restart."""
    (repack,) = summary_of(shrunk)["repacks"]
    assert repack["released_pods"] == ["a-1-1"]
    assert repack["survivors"] == ["a-1-0"]
    assert repack["survivor_uids_unchanged"] is True
    assert repack["pause_ms"] == 50.0


def test_a_survivor_that_came_back_under_another_uid_is_found_out(shrunk):
    """A pod of the same name is not the same pod."""
    shrunk.pod(9, "a-1-0", "a", uid="another")
    (repack,) = summary_of(shrunk)["repacks"]
    assert repack["survivor_uids_unchanged"] is False


def test_a_survivor_whose_container_restarted_is_found_out(shrunk):
    """The UID stays, the process did not."""
    shrunk.pod(9, "a-1-0", "a", restarts=1)
    (repack,) = summary_of(shrunk)["repacks"]
    assert repack["survivor_uids_unchanged"] is False


def test_the_waiting_jobs_start_is_counted_from_release_and_from_proposal(shrunk):
    """Pods gone at 5 s, proposal at 4 s, first report at 8.5 s."""
    summary = summary_of(shrunk)
    assert summary["waiting_job_started_after_repack_s"] == 3.5
    assert summary["waiting_job_started_after_proposal_s"] == 4.5


@pytest.mark.parametrize(("came", "began"), [(2, 4), (5, 6)])
def test_a_job_that_began_before_the_release_or_came_after_it_was_not_waiting_for_it(shrunk, came, began):
    """Only pods made after the released ones were gone count; the job that did wait started later."""
    shrunk.story.see_job(came, job("c", "Waiting"))
    shrunk.pod(began, "c-1-0", "c")
    shrunk.story.see_lease(7, lease("c"))
    assert summary_of(shrunk)["waiting_job_started_after_repack_s"] == 3.5


def test_gpus_handed_out_beyond_a_nodes_own_are_seen_at_the_moment_they_are():
    """Three pods on two GPUs for a moment leave a mark although the third goes again."""
    tale = Tale()
    for index in range(3):
        tale.pod(index, f"p-{index}", "a")
    tale.pod(3, "p-2", "a", deleted=True)
    assert summary_of(tale)["max_gpus_in_use_over_capacity"] == 1


def test_a_finished_pod_holds_no_gpu():
    """As kube-scheduler counts."""
    tale = Tale()
    tale.pod(0, "p-0", "a", phase="Succeeded")
    tale.pod(0, "p-1", "a")
    assert tale.story.gpus_held() == {"n0": 1}


def test_a_rebalance_is_told_once_with_what_was_measured_afterwards():
    """The first report after a move has no imbalance yet; the entry waits for it."""
    tale = Tale()
    tale.story.see_job(0, job("a", "Running"))
    tale.story.see_lease(1, lease("a", step=10, rebalances=1, imbalance_before=0.5))
    assert summary_of(tale)["rebalances"] == []
    moved = {"rebalances": 1, "last_rebalance_step": 10, "imbalance_before": 0.5, "imbalance_after": 0.1}
    tale.story.see_lease(2, lease("a", step=11, rebalance_pause_ms=40.0, **moved))
    tale.story.see_lease(3, lease("a", step=12, rebalance_pause_ms=40.0, **moved))
    (entry,) = summary_of(tale)["rebalances"]
    assert (entry["imbalance_before"], entry["imbalance_after"], entry["pause_ms"]) == (0.5, 0.1, 40.0)


def test_an_unreadable_report_is_narrated_and_the_story_continues():
    """A bad annotation is not the end of the demo."""
    tale = Tale()
    broken = lease("a")
    broken["metadata"]["annotations"][REPORT_ANNOTATION] = "{"
    tale.story.see_lease(1, broken)
    tale.story.see_lease(2, lease("a"))
    assert "unreadable report" in tale.story.narration[0][1]
    assert len(tale.story.reports["a"]) == 1


def test_the_examples_pose_a_problem_on_which_awareness_pays():
    """From the manifests alone: the least-served job gains over the heterogeneity-agnostic allocation."""
    pools = {"v100": 4, "p100": 2, "k80": 2, "p100-spot": 2}
    aware, agnostic = compare_with_agnostic(pools)
    assert min(aware.levels.values()) > 1.2 * min(agnostic.levels.values())


def test_the_summary_is_json_and_the_views_render(shrunk):
    """What the command prints can be printed."""
    summary = summary_of(shrunk)
    assert json.loads(json.dumps(summary)) == summary
    console = Console(record=True, width=160, quiet=False)
    console.print(render(shrunk.story, now=9.0))
    console.print(render_summary(summary))
    text = console.export_text()
    assert "same UIDs, no restart" in text
    assert "emulated" in text
