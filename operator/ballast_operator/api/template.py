"""The part of a PodTemplateSpec that Ballast reads or checks, and what an administrator fills in of it.

What is typed here is refused by the API server on ``kubectl apply``; what else is wrong with a template is
found by a dry run of its first pod (``reconcile.pod_checks``).
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ballast_policies.contract.conditions import Rule, absent, at
from pydantic import ConfigDict, Field, ValidationError

from ballast_operator.api.base import ApiModel, DnsLabel, Name, listed


class TemplatePart(ApiModel):
    """A part of a pod's template, of which only some fields are typed."""

    model_config = ConfigDict(extra="allow")


class EnvironmentVariable(TemplatePart):
    """A variable of a container's environment."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    """The variable."""
    value: str | None = None
    """Its value."""


class Resources(TemplatePart):
    """Resources of a container. GPUs are Ballast's to fill in: one in the first container of each pod."""

    limits: dict[str, Any] | None = None
    """The most it may use, by resource."""
    requests: dict[str, Any] | None = None
    """Amount that is kept free for it, by resource."""


class TemplateContainer(TemplatePart):
    """A container. In the first one, which trains, Ballast fills in command, environment and GPU."""

    name: DnsLabel
    """The container's name."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image to run."""
    command: tuple[str, ...] | None = None
    """Program and first arguments; the first container's default is ``ballast-train pod``."""
    args: tuple[str, ...] | None = None
    """Further arguments."""
    env: tuple[EnvironmentVariable, ...] | None = None
    """Environment; in the first container beside what Ballast sets."""
    resources: Resources | None = None
    """Resources that it asks for beside its GPU."""
    termination_message_path: Annotated[str, Field(max_length=4096)] | None = None
    """File to which the trainer writes why it ended."""


class Toleration(TemplatePart):
    """A taint that the pods tolerate."""

    key: Name | None = None
    """The taint's key; empty: every one."""
    operator: Annotated[str, Field(max_length=32)] | None = None
    """Equal or Exists."""
    value: Name | None = None
    """The taint's value, for Equal."""
    effect: Annotated[str, Field(max_length=32)] | None = None
    """NoSchedule, PreferNoSchedule or NoExecute; empty: every one."""


class NodeRequirement(TemplatePart):
    """Requirement on a label or a field of a node."""

    key: Annotated[str, Field(max_length=317)]
    """The label or the field."""
    operator: Annotated[str, Field(max_length=32)]
    """In, NotIn, Exists, DoesNotExist, Gt or Lt."""
    values: tuple[Name, ...] | None = None
    """Values to compare with."""


class NodeTerm(TemplatePart):
    """Requirements that hold together."""

    match_expressions: tuple[NodeRequirement, ...] | None = None
    """Requirements on the node's labels."""
    match_fields: tuple[NodeRequirement, ...] | None = None
    """Requirements on its fields."""


class NodeTerms(TemplatePart):
    """Terms of which one has to hold."""

    node_selector_terms: tuple[NodeTerm, ...]
    """The terms."""


class NodeAffinity(TemplatePart):
    """Nodes that the pods may run on."""

    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    """Without these a pod is not started."""


class Affinity(TemplatePart):
    """Constraints on where pods run, beside the node that Ballast chooses."""

    node_affinity: NodeAffinity | None = None
    """Affinity by the nodes' labels."""


class TemplatePodSpec(TemplatePart):
    """A PodSpec. Node, restart policy and service account are Ballast's to choose."""

    RULES = (
        Rule(
            condition=at("restart_policy") == "Never",
            field="restart_policy",
            reason="Ballast restarts whole gangs, so pods use restartPolicy Never",
            fix="leave restartPolicy out",
        ),
        Rule(
            condition=absent("node_name"),
            field="node_name",
            reason="Ballast chooses the node",
            fix="leave nodeName out and restrict gpuTypes",
        ),
        Rule(
            condition=absent("service_account_name"),
            field="service_account_name",
            reason="pods run as the job's own service account, <job>-trainer",
            fix="leave serviceAccountName out",
        ),
        Rule(
            condition=absent("active_deadline_seconds"),
            field="active_deadline_seconds",
            reason="Kubernetes would end the pods one by one, and the gang would be launched again each time",
            fix="leave it out; spec.activeDeadlineSeconds limits the whole job",
        ),
    )

    containers: Annotated[tuple[TemplateContainer, ...], listed(64, "name", least=1)]
    """Containers; the first one trains."""
    init_containers: Annotated[tuple[TemplateContainer, ...], listed(64, "name")] | None = None
    """Containers that run before the others."""
    restart_policy: Annotated[str, Field(max_length=32)] | None = None
    """Never, or left out."""
    node_name: Name | None = None
    """Not to be given: Ballast chooses the node."""
    service_account_name: Name | None = None
    """Not to be given: pods run as ``<job>-trainer``."""
    active_deadline_seconds: int | None = None
    """Not to be given: gangs are ended as a whole."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds that the trainer has to save after SIGTERM."""
    tolerations: Annotated[tuple[Toleration, ...], listed(1024)] | None = None
    """Taints that the pods tolerate, beside that of their GPUs."""
    node_selector: dict[str, str] | None = None
    """Labels that a node has to have."""
    affinity: Affinity | None = None
    """Constraints on where pods run."""


class TemplateMetadata(ApiModel):
    """Labels and annotations for the pods."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Added to those that Ballast sets."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations for every pod."""


class PodTemplate(ApiModel):
    """PodTemplateSpec."""

    metadata: TemplateMetadata = TemplateMetadata()
    """Labels and annotations."""
    spec: TemplatePodSpec
    """The pods."""

    def as_object(self) -> dict[str, Any]:
        """The template as JSON, every field that the user gave included."""
        return self.to_dict()


TRAINER_VARIABLE = "BALLAST_TRAINER_TEMPLATE"
"""A PodTemplateSpec as JSON, with one container."""

_NAMED = {"env": "name", "ports": "name", "volumeMounts": "mountPath", "imagePullSecrets": "name"}


@functools.cache
def trainer_template() -> Mapping[str, Any]:
    """This process's template, empty where there is none. Raises ValueError: why it is none."""
    text = os.environ.get(TRAINER_VARIABLE, "")
    if not text:
        return {}
    try:
        template = PodTemplate.model_validate_json(text).as_object()
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"{TRAINER_VARIABLE}: {error}. To fix: a PodTemplateSpec as JSON") from error
    if len(template["spec"]["containers"]) != 1 or "initContainers" in template["spec"]:
        raise ValueError(f"{TRAINER_VARIABLE}: one container, the trainer. To fix: leave the others out")
    return template


def filled_in(template: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """A job's template with what it leaves out: what it has itself always wins.

    Lists of the trainer are joined by name, its security context by field; a volume comes only where the
    trainer mounts it in the end. ``usual``: what is filled in; empty: nothing.
    """
    if not usual:
        return dict(template)
    spec, other = template["spec"], usual["spec"]
    metadata, others = template.get("metadata") or {}, usual.get("metadata") or {}
    trainer = _joined(spec["containers"][0], other["containers"][0])
    mounted = [mount.get("name") for mount in _objects(trainer.get("volumeMounts"))]
    usual_volumes = [volume for volume in other.get("volumes") or () if volume.get("name") in mounted]
    volumes = _beside("name", spec.get("volumes"), usual_volumes)
    whole = _joined(
        spec, {key: value for key, value in other.items() if key not in ("containers", "volumes")}
    )
    return {
        "metadata": {
            part: {**(others.get(part) or {}), **(metadata.get(part) or {})}
            for part in ("labels", "annotations")
        },
        "spec": {
            **whole,
            "containers": [trainer, *spec["containers"][1:]],
            **({"volumes": volumes} if volumes else {}),
        },
    }


def _joined(own: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both; those of ``own`` win, lists of named things and requests are joined."""
    result = {**usual, **own}
    for field in own.keys() & usual.keys():
        if field in _NAMED:
            result[field] = _beside(_NAMED[field], own[field], usual[field] or ())
        elif field == "securityContext":
            result[field] = _over(own[field], usual[field])
        elif field == "resources":
            mine, theirs = own[field] or {}, usual[field] or {}
            result[field] = {part: _over(mine.get(part), theirs.get(part)) for part in {**theirs, **mine}}
    return result


def _over(own: Any, usual: Any) -> Any:
    """The fields of two objects, those of ``own`` first; what is no object is left as it is."""
    if isinstance(own, Mapping) and isinstance(usual, Mapping):
        return {**usual, **own}
    return usual if own is None else own


def _beside(key: str, own: Any, usual: Sequence[Mapping[str, Any]]) -> Any:
    """``own`` and what ``usual`` has beside it; what is no list is left as it is: the API server names it."""
    if own is not None and not isinstance(own, list):
        return own
    taken = [item.get(key) for item in _objects(own)]
    return [*(own or ()), *(item for item in usual if item.get(key) not in taken)]


def _objects(items: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; none of what is no list."""
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
