"""What is written of a status."""

import pytest
from ballast_operator.api.training_job_status import Decision, TrainingJobStatus
from ballast_operator.kube.client import connect
from ballast_operator.kube.kinds import JOB
from ballast_operator.observation.status_changes import status_content

from tests.operator.api.objects import JOB as TRANSLATOR
from tests.operator.api.objects import changed


def test_what_is_empty_is_not_written():
    """Of a job that waits, most is; whoever reads it finds the same status."""
    status = TrainingJobStatus(observed_generation=1, last_decision=Decision(why="no GPUs are free"))
    content = status_content(status)
    assert content.keys() == {"observedGeneration", "lastDecision"}
    assert TrainingJobStatus.model_validate(content) == status


def test_a_job_that_was_launched_has_all_counts():
    """What scripts read of it is there, 0 or not."""
    content = status_content(TrainingJobStatus(launches=1))
    assert (content["launches"], content["restarts"], content["lostSteps"]) == (1, {}, 0)


@pytest.mark.api
async def test_what_has_become_empty_is_removed(control_plane, namespace):
    """By the API server, since the operator has written it before."""
    async with await connect(str(control_plane.kubeconfig)) as cluster:
        await cluster.create(JOB, changed(TRANSLATOR, "metadata.namespace", namespace))
        name = {"namespace": namespace, "name": TRANSLATOR["metadata"]["name"]}
        for seconds in (3.0, 0.0):
            status = status_content(TrainingJobStatus(observed_generation=2, suspended_seconds=seconds))
            body = {"apiVersion": JOB.api_version, "kind": JOB.kind, "metadata": name, "status": status}
            answer = await cluster.write_status(JOB, body)
            assert TrainingJobStatus.model_validate(answer["status"]).suspended_seconds == seconds
        assert answer["status"] == {"observedGeneration": 2}
