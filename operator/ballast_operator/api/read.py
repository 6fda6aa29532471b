"""Objects as the API server gives them -> models. The one place where bytes become values."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ballast_policies.contract.decode import decode
from ballast_policies.contract.errors import ContractError, Problem
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.model import cluster_problems
from pydantic import ValidationError

from ballast_operator.api.base import ApiModel
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.training_job import TrainingJob
from ballast_operator.api.training_job_status import TrainingJobStatus

M = TypeVar("M", bound=ApiModel)


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
    asked = cluster_problems(JobConfig, spec) if isinstance(spec, Mapping) else ()
    return _read(TrainingJob, item, [problem.below("spec") for problem in asked])


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


def readable_status(item: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TrainingJob's status that can be read; the others count as never written.

    Its launches are at least the one that it is in: pods of another would have the names of those that run.
    """
    status = item.get("status")
    kept = dict(status) if isinstance(status, Mapping) else {}
    try:
        TrainingJobStatus.model_validate(kept)
    except ValidationError as error:
        for problem in error.errors():
            kept.pop(str(problem["loc"][0]), None)
    read = TrainingJobStatus.model_validate(kept)
    if read.allocation is not None and read.launches < read.allocation.launch:
        kept["launches"] = read.allocation.launch
    return kept


def unknown_fields(model: type[ApiModel], part: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``part`` that ``model`` lacks: a newer operator has written them, and they are kept."""
    known = {field.alias or name for name, field in model.model_fields.items()}
    return {name: value for name, value in part.items() if name not in known}


def _read(model: type[M], item: Mapping[str, Any], problems: Iterable[Problem] = ()) -> M:
    """``item`` as a ``model``; ``problems``: what is known to be wrong with it."""
    try:
        read = decode(model, item, parsed=True)
    except ContractError as error:
        found = {problem.path for problem in error.problems}
        problems = [*error.problems, *(problem for problem in problems if problem.path not in found)]
    if problems:
        raise InvalidObject(tuple(map(str, problems)))
    return read
