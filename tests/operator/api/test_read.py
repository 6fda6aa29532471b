"""The operator reads objects into models by the same rules as the API server checks them."""

import pytest
from ballast_operator.api.read import InvalidObject, read_cluster_policy, read_training_job
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import RebalanceConfig
from ballast_policies.protocol.observed import Cause

from tests.operator.api.malformed import JOBS, POLICIES
from tests.operator.api.objects import JOB, POLICY, RESHAPED, Malformed, changed


def read_here(cases: list[Malformed]) -> pytest.MarkDecorator:
    """Only the API server compares the entries of a list: an object with two of one key never gets here."""
    known = [case for case in cases if case.words != "duplicate"]
    return pytest.mark.parametrize("case", known, ids=lambda case: case.scenario)


@read_here(JOBS)
def test_a_malformed_training_job_is_refused_on_reading(case: Malformed) -> None:
    """Should an old CRD have let it through; the message names the field."""
    with pytest.raises(InvalidObject) as caught:
        read_training_job(changed(JOB, case.path, case.value))
    assert any(problem.startswith(case.field) for problem in caught.value.problems)


@read_here(POLICIES)
def test_a_malformed_cluster_policy_is_refused_on_reading(case: Malformed) -> None:
    """The message names the field."""
    with pytest.raises(InvalidObject) as caught:
        read_cluster_policy(changed(POLICY, case.path, case.value))
    assert any(problem.startswith(case.field) for problem in caught.value.problems)


def test_all_problems_of_an_object_are_named_at_once() -> None:
    """All are named at once, so that a user fixes them in one go."""
    item = changed(changed(JOB, "spec.totalSteps", 0), "spec.weight", "heavy")
    with pytest.raises(InvalidObject) as caught:
        read_training_job(item)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["spec.totalSteps", "spec.weight"]


def test_entries_of_a_list_that_are_refused_are_not_said_to_be_missing() -> None:
    """The list is long enough once they are right."""
    pools = [{**pool, "pricePerGpuHour": -1} for pool in POLICY["spec"]["nodePools"]]
    with pytest.raises(InvalidObject) as caught:
        read_cluster_policy(changed(POLICY, "spec.nodePools", pools))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        f"spec.nodePools[{number}].pricePerGpuHour" for number in range(len(pools))
    ]


def test_a_broken_rule_over_two_fields_names_the_field_to_change() -> None:
    with pytest.raises(InvalidObject, match=r"spec\.pipeline\.minStages: .* To fix: lower minStages"):
        read_training_job(changed(JOB, "spec.pipeline.minStages", 5))


def test_the_trainers_fields_are_the_contracts_configuration() -> None:
    """What the operator reads is what the trainer reads in config.json, with defaults filled in."""
    config = read_training_job(JOB).spec.config
    assert JobConfig.from_json(config.to_json()) == config
    assert config.to_dict()["model"] == {"name": "gpt", "args": {"width": 64}, "layers": 8}
    assert config.rebalance == RebalanceConfig()
    assert config.data is None
    reshaped = read_training_job(RESHAPED).spec.config
    assert reshaped.to_dict()["rebalance"].items() >= RESHAPED["spec"]["rebalance"].items()


def test_the_defaults_are_the_trainers() -> None:
    """A job means the same with and without Kubernetes."""
    given = {key: JOB["spec"][key] for key in ("totalSteps", "model", "pipeline", "dynamics", "checkpoint")}
    assert read_training_job(JOB).spec.config == JobConfig.from_mapping(given)


def test_what_a_cluster_needs_and_the_trainer_does_not() -> None:
    """Each is named, along with what is wrong with the rest of the object."""
    item = changed(changed(JOB, "spec.pipeline", {"minStages": 0}), "spec.weight", "heavy")
    with pytest.raises(InvalidObject) as caught:
        read_training_job(item)
    assert {problem.split(":")[0] for problem in caught.value.problems} == {
        "spec.pipeline.minStages",
        "spec.pipeline.maxStages",
        "spec.pipeline.globalBatchSize",
        "spec.weight",
    }


def test_the_attribute_that_holds_the_trainers_fields_is_no_field() -> None:
    """It cannot be set from outside."""
    with pytest.raises(InvalidObject, match=r"spec\.config: there is no such field"):
        read_training_job(changed(JOB, "spec.config", {"totalSteps": 5}))


def test_fields_of_the_pods_that_ballast_does_not_know() -> None:
    """Pass through to the pods unchanged."""
    volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "shared"}}
    item = changed(JOB, "spec.template.spec.volumes", [volume])
    container = {"name": "trainer", "image": "t:1", "env": [{"name": "A", "value": "b"}]}
    item = changed(item, "spec.template.spec.containers", [container])
    template = read_training_job(item).spec.template.as_object()
    assert template["spec"] == {"volumes": [volume], "containers": [container]}


def test_a_status_of_a_newer_operator_is_read_as_far_as_it_is_known() -> None:
    """A rollback of the operator loses no job."""
    status = {"state": "Running", "launches": 2, "sparkles": True}
    read = read_training_job(changed(JOB, "status", status)).status
    assert (read.state, read.launches) == ("Running", 2)
    since = "2026-01-01T00:00:00Z"
    held = {"gpuType": "a", "pool": "a", "gpus": 1, "pods": ["p"], "nodes": ["n"], "since": since}
    held["ending"] = {"cause": "Stardust", "since": since, "sparkles": True}
    status |= {"state": "Hibernating", "allocation": held}
    read = read_training_job(changed(JOB, "status", status)).status
    assert (read.state, read.summary_state) == (None, "Stopping")
    assert read.allocation.ending.cause is Cause.PREEMPTED


@pytest.mark.parametrize("deadline", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_deadline_that_is_of_no_year_in_utc_is_refused(deadline):
    """No message could show it."""
    with pytest.raises(InvalidObject, match=r"spec\.deadline: .*between the years 1 and 9999"):
        read_training_job(changed(JOB, "spec.deadline", deadline))
