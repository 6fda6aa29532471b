"""A job without a model on a real API server: its command and the client library are processes."""

import pytest
from ballast_client import Checkpoints

from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]


def step(status):
    return (status.get("progress") or {}).get("step", 0)


def test_a_script_is_asked_to_save_resumes_and_succeeds(stage):
    """Two ranks find each other, report, leave after the same step, and continue with the next one."""
    with stage.operator():
        stage.add_command("one", ranks=2, total=1_000_000)
        eventually(lambda: step(stage.status("one")) > 0, "progress")
        eventually(lambda: stage.condition("one", "Reporting").get("status") == "True", "the condition")
        stage.patch("one", {"suspend": True})
        stage.wait_for("one", "Suspended")
        status = stage.status("one")
        assert not status.get("restarts")
        saved, _ = Checkpoints(stage.job("one")["spec"]["checkpoint"]["path"]).newest()
        assert saved >= step(status)
        stage.patch("one", {"suspend": False, "totalSteps": saved + 20})
        status = stage.wait_for("one", "Succeeded")
        assert status["launches"] == 2 and not status.get("restarts")
        eventually(lambda: step(stage.status("one")) == saved + 20, "the last step")
