"""A running gang takes free GPUs and gives them back, on a real API server with trainers as processes."""

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

        def joined():
            allocation = stage.status("one")["allocation"]
            return (allocation["pods"], allocation.get("joining", [])) == (["one-1-0", "one-1-1"], [])

        eventually(joined, "both pods to be the gang")
        status = stage.status("one")
        assert status["launches"] == 1
        assert not status.get("restarts")
        assert stage.pods("one")["one-1-0"].metadata.uid == uid
        step = status["progress"]["step"]
        eventually(lambda: stage.status("one")["progress"]["step"] > step, "more steps")


@pytest.mark.nightly
def test_two_elastic_jobs_share_a_pool_and_the_one_that_stays_takes_it_all_again(stage, tmp_path):
    """The first gives a GPU back while it trains, and takes it again: the same launch, the same first pod."""
    end, endless = tmp_path / "end", {"total": 1_000_000}
    pipeline = {"minStages": 1, "maxStages": 2, "microbatches": 8, "globalBatchSize": 16}
    elastic = {"pipeline": pipeline, "gpuTypes": ["fast"], "repack": {"enabled": False}}
    with stage.operator():
        stage.add_job("one", script=endless, **elastic)
        stage.wait_for("one", "Running")
        eventually(lambda: len(stage.status("one")["allocation"]["pods"]) == 2, "two pods")
        uid = stage.pods("one")["one-1-0"].metadata.uid
        stage.add_job("two", script={"total": 20, "finishFile": str(end)}, **elastic)
        stage.wait_for("two", "Running")
        assert stage.status("one")["allocation"]["pods"] == ["one-1-0"]
        assert len(stage.status("two")["allocation"]["pods"]) == 1
        shrunk = eventually(lambda: stage.condition("one", "Shrunk"), "the condition")
        assert (shrunk["status"], shrunk["reason"]) == ("True", "GpusGivenBack")
        assert stage.status("one")["repacks"][-1]["asked"] is True
        end.touch()
        stage.wait_for("two", "Succeeded")
        eventually(lambda: stage.condition("one", "Grown").get("status") == "True", "the job to have grown")
        eventually(lambda: len(stage.status("one")["allocation"]["pods"]) == 2, "two pods again")
        status = stage.status("one")
        assert (status["launches"], status.get("restarts", {})) == (1, {})
        assert stage.pods("one")["one-1-0"].metadata.uid == uid
