"""The generated CRDs: what the API server needs is there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.api.base import ApiModel
from ballast_operator.api.schema.crd import (
    UnsupportedSchemaError,
    crd_files,
    custom_resource_definitions,
    structural_schema,
)
from ballast_operator.cli.crds import crds
from click.testing import CliRunner
from pydantic import Field


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside one, with its path."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from schemas(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from schemas(schema[key], f"{path}.{key}")


@pytest.fixture(scope="module")
def everything() -> list[tuple[str, dict[str, Any]]]:
    return [
        (definition["spec"]["names"]["kind"] + path, schema)
        for definition in custom_resource_definitions()
        for path, schema in schemas(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    ]


@pytest.mark.slow
def test_the_command_writes_them(tmp_path: Path) -> None:
    result = CliRunner().invoke(crds, ["--output-dir", str(tmp_path / "made")])
    assert result.exit_code == 0
    assert {path.name: path.read_text() for path in (tmp_path / "made").iterdir()} == crd_files()


@pytest.mark.slow
def test_ballast_crds_prints_them_for_kubectl() -> None:
    result = CliRunner().invoke(crds, ["--output-dir", "-"])
    assert list(yaml.safe_load_all(result.stdout)) == custom_resource_definitions()


def test_short_names_and_category() -> None:
    """``kubectl get tj``, ``kubectl get bcp`` and ``kubectl get ballast`` find the kinds."""
    names = [definition["spec"]["names"] for definition in custom_resource_definitions()]
    assert [n["shortNames"] for n in names] == [["tj"], ["bcp"]]
    assert [n["categories"] for n in names] == [["ballast"], ["ballast"]]


def test_every_field_has_a_type_and_a_merge_rule(everything) -> None:
    """A list says how it merges or holds scalars, and conditions merge by type; rules say what to do."""
    for path, schema in everything:
        assert schema["type"] in ("object", "array", "string", "integer", "number", "boolean"), path
        if schema["type"] == "array" and "maxItems" in schema:
            assert "x-kubernetes-list-type" in schema, path
        if path.endswith(".conditions"):
            assert schema["x-kubernetes-list-map-keys"] == ["type"], path
        for rule in schema.get("x-kubernetes-validations", []):
            assert len(rule.get("message", "")) < 600, path  # the policies by name, which kubectl prints
            assert ". To fix: " in rule.get("message", rule.get("messageExpression")), path


def test_no_defaults_in_a_status(everything) -> None:
    """A status says what was written, not what a schema made up."""
    assert [path for path, schema in everything if ".status" in path and "default" in schema] == []


def test_a_model_that_a_crd_cannot_express_is_refused() -> None:
    """With the path, instead of a CRD that means something else."""

    class Either(ApiModel):
        value: int | str

    with pytest.raises(UnsupportedSchemaError, match=r"Either\.value: a CRD cannot say one of 2 schemas"):
        structural_schema(Either, defaults=True)


def test_a_fractional_bound_is_refused() -> None:
    """The API server would take 0 for at least 0.05."""

    class Fraction(ApiModel):
        value: float = Field(ge=0.05)

    with pytest.raises(UnsupportedSchemaError, match=r"Fraction\.value: minimum 0\.05 is not a whole number"):
        structural_schema(Fraction, defaults=True)


def test_an_optional_field_has_the_type_of_its_value() -> None:
    """Kubernetes has no null: None is absent."""

    class Optional(ApiModel):
        value: int | None = None
        """A value."""

    assert structural_schema(Optional, defaults=True)["properties"]["value"] == {
        "description": "A value.",
        "type": "integer",
        "format": "int64",
    }


def test_exclusive_bounds_are_a_number_and_a_flag() -> None:
    """As OpenAPI 3.0 has them."""

    class Positive(ApiModel):
        value: float = Field(gt=0)

    value = structural_schema(Positive, defaults=True)["properties"]["value"]
    assert (value["minimum"], value["exclusiveMinimum"]) == (0, True)
