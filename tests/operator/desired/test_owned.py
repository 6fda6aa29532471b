"""What every object of a job carries."""

from ballast_operator.desired.owned import owned
from ballast_operator.kube.kinds import LEASE
from ballast_policies.contract import JOB_LABEL

from tests.operator.steps.contexts import a_running_view


def test_an_object_of_a_job_is_labelled_and_owned_by_it():
    """Deleted with the job by the garbage collector; found by the job's label."""
    item = owned(a_running_view(), LEASE, "job", spec={"holderIdentity": ""})
    metadata = item["metadata"]
    assert (item["apiVersion"], item["kind"], item["spec"]) == (
        "coordination.k8s.io/v1",
        "Lease",
        {"holderIdentity": ""},
    )
    assert (metadata["namespace"], metadata["name"], metadata["labels"][JOB_LABEL]) == ("team", "job", "job")
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("TrainingJob", "job", "uid-job")
    assert owner["controller"] is True
