"""The ConfigMap that carries the plan and the trainer's configuration."""

from typing import Any

from ballast_policies.contract import CONFIG_KEY, PLAN_KEY, Plan, plan_config_map_name

from ballast_operator.desired.owned import owned
from ballast_operator.kube.kinds import CONFIG_MAP
from ballast_operator.views.clock import Time, show_micro
from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION, JobView
from ballast_operator.views.spec import JobSpec


def plan_object(
    view: JobView, spec: JobSpec, plan: Plan, *, now: Time, resource_version: str | None
) -> dict[str, Any]:
    """The ConfigMap with ``plan``; refused by the API server where ``resource_version`` is not the newest."""
    data = {PLAN_KEY: plan.to_json(), CONFIG_KEY: spec.config.to_json()}
    body = owned(view, CONFIG_MAP, plan_config_map_name(view.name), data=data)
    body["metadata"]["annotations"] = {PLAN_WRITTEN_ANNOTATION: show_micro(now)}
    if resource_version is not None:
        body["metadata"]["resourceVersion"] = resource_version
    return body
