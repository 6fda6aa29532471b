"""JSON schema of a pydantic model -> structural schema of a CRD.

Kubernetes takes a subset of OpenAPI v3.0: no ``$ref``, no ``null``, no ``const``, and
``exclusiveMinimum`` is a yes or no beside ``minimum``.  Unknown fields are dropped by default, so
``additionalProperties: false`` says nothing, and ``true`` becomes ``x-kubernetes-preserve-unknown-fields``.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract.model import Model

from ballast_operator.api.schema.model_schema import CrdJsonSchema, worth_defaulting

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
    """The structural schema of a model.

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
