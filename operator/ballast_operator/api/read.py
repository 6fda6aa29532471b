"""Objects as the API server gives them -> models. The one place where bytes become values."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from ballast_policies.contract.errors import join_path
from pydantic import ValidationError

from ballast_operator.api.base import ApiModel
from ballast_operator.api.cluster_policy import ClusterPolicy, ClusterPolicySpec, Objective
from ballast_operator.api.node_pool import NodePool
from ballast_operator.api.training_job import CONFIG, CONFIG_FIELDS, TrainingJob, TrainingJobSpec
from ballast_operator.api.training_job_status import TrainingJobStatus

M = TypeVar("M", bound=ApiModel)

REFUSED = {
    refused.name: refused.message
    for model in (TrainingJobSpec, ClusterPolicySpec, NodePool, Objective)
    for refused in model.REFUSED
}
"""Fields that are planned and refused until then -> what to do instead."""


class InvalidObject(ValueError):  # noqa: N818 - reads as a sentence where it is raised
    """An object cannot be used.

    Attributes:
        problems: one line each: ``spec.pipeline.maxStages: what is wrong``.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def read_training_job(item: Mapping[str, Any]) -> TrainingJob:
    """A TrainingJob from its JSON.

    Raises:
        InvalidObject: a field is missing, unknown, of the wrong type, or breaks a rule.
    """
    spec = item.get("spec")
    if isinstance(spec, Mapping):
        # A key "config" of the user's stays among the trainer's fields, which refuse it as unknown.
        config = {key: value for key, value in spec.items() if key in CONFIG_FIELDS or key == CONFIG}
        own = {key: value for key, value in spec.items() if key not in config}
        item = {**item, "spec": {CONFIG: config, **own}}
    return _read(TrainingJob, item)


def read_cluster_policy(item: Mapping[str, Any]) -> ClusterPolicy:
    """A ClusterPolicy from its JSON.

    Raises:
        InvalidObject: a field is missing, unknown, of the wrong type, or breaks a rule.
    """
    return _read(ClusterPolicy, item)


def read_job_status(item: Mapping[str, Any]) -> TrainingJobStatus:
    """The status of a TrainingJob.

    Raises:
        ValueError: it is not one that any release has written; nothing may be decided from it.
    """
    return TrainingJobStatus.model_validate(item.get("status") or {})


def unknown_fields(model: type[ApiModel], part: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``part`` that ``model`` lacks: a newer operator has written them, and they are kept."""
    known = {field.alias or name for name, field in model.model_fields.items()}
    return {name: value for name, value in part.items() if name not in known}


def _read(model: type[M], item: Mapping[str, Any]) -> M:
    # Through JSON: only there does strict mode take a word for an enum and a text for a time.
    try:
        return model.model_validate_json(json.dumps(item))
    except ValidationError as error:
        raise InvalidObject(tuple(_problem(detail) for detail in error.errors(include_url=False))) from error


def _problem(detail: Any) -> str:
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    if detail["type"] == "config":
        context = detail["ctx"]
        return f"{join_path('spec', context['path'])}: {context['text']}"
    if detail["type"] == "missing":
        return f"{path[1:]}: missing. To fix: give it a value"
    if detail["type"] == "extra_forbidden" and detail["loc"][-1] in REFUSED:
        return f"{path[1:]}: {REFUSED[detail['loc'][-1]]}"
    if detail["type"] == "extra_forbidden":
        return f"{path[1:]}: there is no such field. To fix: leave it out, or correct its spelling"
    if detail["type"] == "rule":
        return f"{(path + detail['ctx']['field'])[1:]}: {detail['msg']}"
    return f"{path[1:]}: {detail['msg']}, got {json.dumps(detail['input'])[:200]}"
