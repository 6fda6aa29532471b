"""The ConfigMap that carries the plan."""

import datetime

from ballast_operator.desired.owned import plan_object
from ballast_policies.contract import CONFIG_KEY, PLAN_KEY, Plan
from ballast_policies.contract.job.job import JobConfig

from tests.operator.steps.contexts import NOW, PODS, a_running_view
from tests.operator.views.builders import a_config, a_plan, a_spec

CONFIG = a_config()


def written(**changes):
    arguments = {"now": NOW, "resource_version": None, **changes}
    return plan_object(a_running_view(), a_spec(config=CONFIG), a_plan(PODS), **arguments)


def test_the_plan_and_the_configuration_stand_side_by_side():
    """Both read back as what was written."""
    data = written()["data"]
    assert Plan.from_json(data[PLAN_KEY]) == a_plan(PODS)
    assert JobConfig.from_json(data[CONFIG_KEY]) == CONFIG


def test_the_time_of_writing_is_an_annotation_with_microseconds():
    """The wait for the acknowledgement is measured from it."""
    item = written(now=NOW + datetime.timedelta(microseconds=5))
    assert item["metadata"]["annotations"] == {"ballast.dev/written": "2026-01-01T12:00:00.000005Z"}


def test_a_plan_replaces_only_the_version_it_was_decided_on():
    """Without a version the object must not exist yet."""
    assert written(resource_version="7")["metadata"]["resourceVersion"] == "7"
    assert "resourceVersion" not in written()["metadata"]
