"""A running gang takes a free GPU, on a real API server with trainers that are processes."""

import pytest

from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]


def test_a_running_job_grows_when_it_may_have_more_stages(stage):
    """A new pod joins the launch; the old one keeps its uid and continues."""
    with stage.operator():
        stage.add_job("one", stages=1, script={"total": 1_000_000}, grow=True)
        stage.wait_for("one", "Running")
        (uid,) = [pod.metadata.uid for pod in stage.pods("one").values()]
        stage.patch("one", {"pipeline": {"maxStages": 2}})
        grown = eventually(
            lambda: (
                condition if (condition := stage.condition("one", "Grown")).get("status") == "True" else None
            ),
            "the job to have grown",
        )
        assert grown["message"] == "one-1-1 joined; 2 ranks train"
        status = stage.status("one")
        assert status["allocation"]["pods"] == ["one-1-0", "one-1-1"]
        assert status["allocation"].get("joining", []) == []
        assert status["launches"] == 1
        assert not status.get("restarts")
        assert stage.pods("one")["one-1-0"].metadata.uid == uid
        step = status["progress"]["step"]
        eventually(lambda: stage.status("one")["progress"]["step"] > step, "more steps")
