"""The part of a PodTemplateSpec that Ballast checks; all its other fields pass through to the pods."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ballast_operator.api.base import ApiModel, DnsLabel, Rule, schema


class TemplateContainer(ApiModel):
    """A container. In the first one, which trains, Ballast fills in command, environment and GPU."""

    model_config = ConfigDict(extra="allow")

    name: DnsLabel
    """The container's name."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image to run."""
    command: tuple[str, ...] | None = None
    """Program and first arguments; the first container's default is ``ballast-train pod``."""
    args: tuple[str, ...] | None = None
    """Further arguments."""


class TemplatePodSpec(ApiModel):
    """A PodSpec. Node, restart policy and service account are Ballast's to choose."""

    model_config = ConfigDict(extra="allow")

    RULES = (
        Rule(
            "!has(self.restartPolicy) || self.restartPolicy == 'Never'",
            "Ballast restarts whole gangs, so pods use restartPolicy Never. To fix: leave restartPolicy out",
            field=".restartPolicy",
            holds=lambda spec: spec.restart_policy in (None, "Never"),
        ),
        Rule(
            "!has(self.nodeName)",
            "Ballast chooses the node. To fix: leave nodeName out and restrict gpuTypes",
            field=".nodeName",
            holds=lambda spec: spec.node_name is None,
        ),
        Rule(
            "!has(self.serviceAccountName)",
            "pods run as the job's own service account, <job>-trainer. To fix: leave serviceAccountName out",
            field=".serviceAccountName",
            holds=lambda spec: spec.service_account_name is None,
        ),
    )

    containers: Annotated[
        tuple[TemplateContainer, ...],
        Field(min_length=1, max_length=64, json_schema_extra=schema(list_type="map", list_map_keys=["name"])),
    ]
    """Containers; the first one trains."""
    restart_policy: Annotated[str, Field(max_length=32)] | None = None
    """Never, or left out."""
    node_name: Annotated[str, Field(max_length=253)] | None = None
    """Not to be given: Ballast chooses the node."""
    service_account_name: Annotated[str, Field(max_length=253)] | None = None
    """Not to be given: pods run as ``<job>-trainer``."""


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
