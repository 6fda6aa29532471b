"""The Lease that rank 0 renews."""

from ballast_operator.desired.owned import lease_object
from ballast_policies.contract import lease_name

from tests.operator.steps.contexts import a_running_view


def test_the_lease_is_named_after_the_job_and_left_to_the_trainer():
    """Only how long it lasts, in whole seconds: applying it again takes nothing from the trainer."""
    item = lease_object(a_running_view(), 59.5)
    assert item["metadata"]["name"] == lease_name("job")
    assert item["spec"] == {"leaseDurationSeconds": 60} and "annotations" not in item["metadata"]
