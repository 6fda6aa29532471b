"""The two CustomResourceDefinitions, made from the models."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import yaml
from ballast_policies.contract.model import Model

from ballast_operator.api import meta
from ballast_operator.api.base import ApiModel
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.schema.model_schema import CrdJsonSchema, validations, worth_defaulting
from ballast_operator.api.training_job import TrainingJob

Schema = dict[str, Any]

_COPIED = (
    "enum",
    "format",
    "maximum",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minimum",
    "minItems",
    "minLength",
    "minProperties",
    "pattern",
    "uniqueItems",
)
_READ = {
    "$ref",
    "additionalProperties",
    "anyOf",
    "const",
    "default",
    "description",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "properties",
    "propertyNames",
    "required",
    "title",
    "type",
}


class UnsupportedSchemaError(TypeError):
    """A model uses what a CRD cannot say; the text names the path."""


def structural_schema(model: type[Model], *, defaults: bool) -> Schema:
    """The structural schema of a model: a subset of OpenAPI v3.0, without ``$ref``, ``null`` and ``const``.

    Unknown fields are dropped by default, so ``additionalProperties: false`` says nothing, and ``true``
    becomes ``x-kubernetes-preserve-unknown-fields``; ``exclusiveMinimum`` is a yes or no beside ``minimum``.

    Args:
        model: the model; its fields go by their camelCase names.
        defaults: whether the API server fills in defaults (for a spec; a status is left as it was written).

    Raises:
        UnsupportedSchemaError: the model's schema has something that a CRD cannot say.
    """
    generated = model.model_json_schema(by_alias=True, mode="validation", schema_generator=CrdJsonSchema)
    return _convert(generated, generated.get("$defs", {}), model.__name__, defaults)


def _convert(source: Mapping[str, Any], definitions: Mapping[str, Any], path: str, defaults: bool) -> Schema:
    source = _resolve(source, definitions, path)
    extensions = {key: value for key, value in source.items() if key.startswith("x-kubernetes-")}
    unknown = source.keys() - _READ - set(_COPIED) - extensions.keys() - {"$defs"}
    if unknown:
        raise UnsupportedSchemaError(f"{path}: a CRD cannot say {sorted(unknown)}")
    result: Schema = {}
    if "description" in source:
        result["description"] = " ".join(inspect.cleandoc(source["description"]).split())
    if "type" in source:
        result["type"] = source["type"]
    if "const" in source:
        result["enum"] = [source["const"]]
    result |= {key: source[key] for key in _COPIED if key in source}
    result |= _bounds(source, path)
    if defaults and worth_defaulting(source.get("default"), is_model=_is_model(source)):
        result["default"] = _default(source)
    if "items" in source:
        result["items"] = _convert(source["items"], definitions, f"{path}[]", defaults)
    if source.get("type") == "object":
        result |= _object(source, definitions, path, defaults)
    return result | extensions


def _bounds(source: Mapping[str, Any], path: str) -> Schema:
    """The bounds of a number, as OpenAPI v3.0 has them."""
    result: Schema = {}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in source:
            result |= {bound: source[exclusive], exclusive: True}
        limit = result.get(bound, source.get(bound))
        if limit is not None and int(limit) != limit:
            # The API server cuts the fraction off a bound before it compares a whole number with it.
            raise UnsupportedSchemaError(f"{path}: {bound} {limit} is not a whole number")
    if source.get("type") == "integer":
        result["format"] = "int64"
    return result


def _resolve(source: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Inline references; what stands beside a reference wins over what it refers to."""
    if "anyOf" in source:
        choices = [choice for choice in source["anyOf"] if choice.get("type") != "null"]
        if len(choices) != 1:
            raise UnsupportedSchemaError(f"{path}: a CRD cannot say one of {len(choices)} schemas")
        beside = {key: value for key, value in source.items() if key != "anyOf"}
        # "Absent" is Kubernetes' word for None, so a null default is no default.
        if beside.get("default", ...) is None:
            del beside["default"]
        return _resolve({**choices[0], **beside}, definitions, path)
    if "$ref" in source:
        target = definitions[source["$ref"].rsplit("/", 1)[-1]]
        beside = {key: value for key, value in source.items() if key != "$ref"}
        rules = "x-kubernetes-validations"
        merged = {**target, **beside}
        if rules in target and rules in beside:
            merged[rules] = [*target[rules], *beside[rules]]
        return _resolve(merged, definitions, path)
    return source


def _object(source: Mapping[str, Any], definitions: Mapping[str, Any], path: str, defaults: bool) -> Schema:
    result: Schema = {}
    if source.get("properties"):
        result["properties"] = {
            name: _convert(part, definitions, f"{path}.{name}", defaults)
            for name, part in source["properties"].items()
        }
    if source.get("required"):
        result["required"] = list(source["required"])
    extra = source.get("additionalProperties")
    if extra is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(extra, Mapping):
        result["additionalProperties"] = _convert(extra, definitions, f"{path}.*", defaults)
    return result


def _is_model(source: Mapping[str, Any]) -> bool:
    return source.get("type") == "object" and "properties" in source


def _default(source: Mapping[str, Any]) -> Any:
    # An object's own fields have their defaults; the empty object lets the API server fill them in.
    return {} if _is_model(source) else source["default"]


HEADER = "# Generated from the models in ballast_operator.api by `ballast crds`. Edit those.\n"


def column(name: str, kind: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    """A column of ``kubectl get``, of ``additionalPrinterColumns``; ``wide``: with ``-o wide`` alone."""
    shown = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**shown, "priority": 1} if wide else shown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Description of a kind in its CRD, beyond its schema."""

    kind: str
    plural: str
    short_name: str
    scope: str
    root: type[ApiModel]
    columns: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        """Name of the CRD."""
        return f"{self.plural}.{meta.GROUP}"

    def part(self, name: str) -> type[Model]:
        """The model of its spec or status."""
        found: type[Model] = self.root.model_fields[name].annotation  # type: ignore[assignment]
        return found


RESOURCES = (
    Resource(
        kind=meta.TRAINING_JOB_KIND,
        plural=meta.TRAINING_JOB_PLURAL,
        short_name="tj",
        scope="Namespaced",
        root=TrainingJob,
        columns=(
            column("State", "string", ".status.state", "What it does, in one word."),
            column("GPU type", "string", ".status.allocation.allGpuTypes", "Types of the GPUs it holds."),
            column("GPUs", "integer", ".status.allocation.gpus", "GPUs it holds."),
            column("Step", "integer", ".status.progress.step", "Optimizer steps done."),
            column("Progress%", "integer", ".status.progress.percent", "Of spec.totalSteps."),
            column("Pool", "string", ".status.allocation.pool", "Node pool of its GPUs.", wide=True),
            column("Steps/s", "number", ".status.progress.stepsPerSecond", "Speed.", wide=True),
            column("Loss", "number", ".status.progress.loss", "Training loss.", wide=True),
            column(
                "Imbalance", "number", ".status.progress.imbalance", "Busiest rank / mean - 1.", wide=True
            ),
            column(
                "Why",
                "string",
                '.status.conditions[?(@.type=="Admitted")].reason',
                "Reason of the condition Admitted.",
                wide=True,
            ),
            column("Age", "date", ".metadata.creationTimestamp", "Since it was made."),
        ),
    ),
    Resource(
        kind=meta.CLUSTER_POLICY_KIND,
        plural=meta.CLUSTER_POLICY_PLURAL,
        short_name="bcp",
        scope="Cluster",
        root=ClusterPolicy,
        columns=(
            column("Policy", "string", ".spec.objective.policy", "What the allocation aims at."),
            column(
                "Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether it is in force."
            ),
            column("Why", "string", '.status.conditions[?(@.type=="Ready")].reason', "Reason of Ready."),
            column("GPUs", "integer", ".status.gpus", "GPUs over all pools."),
            column("Held", "integer", ".status.gpusHeld", "GPUs that jobs hold."),
            column("Waiting", "integer", ".status.jobsWaiting", "Jobs that want GPUs and have none."),
            column("Dry run", "boolean", ".spec.dryRun", "Decides, but starts and stops nothing.", wide=True),
            column(
                "Solved",
                "string",
                '.status.conditions[?(@.type=="Solved")].reason',
                "How the last allocation was found.",
                wide=True,
            ),
            column("Age", "date", ".metadata.creationTimestamp", "Since it was made."),
        ),
    ),
)
"""Kinds of the API."""


def custom_resource_definitions() -> list[dict[str, Any]]:
    """CRDs, in a fixed order; fresh values each time."""
    return [_definition(resource) for resource in RESOURCES]


def crd_files() -> dict[str, str]:
    """File name below ``crds/`` -> its text."""
    return {f"{meta.GROUP}_{each.plural}.yaml": HEADER + to_yaml(_definition(each)) for each in RESOURCES}


def to_yaml(value: Any) -> str:
    """YAML in the order of the value, the same bytes for the same value."""
    text: str = yaml.safe_dump(value, sort_keys=False, width=110, allow_unicode=True)
    return text


def _definition(resource: Resource) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": resource.name, "labels": {"app.kubernetes.io/part-of": "ballast"}},
        "spec": {
            "group": meta.GROUP,
            "scope": resource.scope,
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": [resource.short_name],
                "categories": [meta.CATEGORY],
            },
            "versions": [
                {
                    "name": meta.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": list(resource.columns),
                    "schema": {"openAPIV3Schema": root_schema(resource)},
                }
            ],
        },
    }


def root_schema(resource: Resource) -> Schema:
    """The schema of a kind."""
    root: Schema = {
        "description": " ".join((resource.root.__doc__ or "").split()),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(resource.part("spec"), defaults=True),
            "status": structural_schema(resource.part("status"), defaults=False),
        },
    }
    if resource.root.RULES:
        root["x-kubernetes-validations"] = validations(resource.root.RULES)
    return root
