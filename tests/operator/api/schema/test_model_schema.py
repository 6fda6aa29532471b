"""The schema that is made from the contract's configuration: complete, and evaluated as Python does."""

import collections
from collections.abc import Iterator
from typing import Any

import pytest
from ballast_operator.api.base import ApiModel
from ballast_operator.api.schema.crd import structural_schema
from ballast_operator.api.schema.model_schema import cel_rule, required_fields
from ballast_policies.contract.conditions import AtDefaults, Cel, Items, Rule, absent, at, given
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import PipelineConfig


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in schema.get("properties", {}).items():
        yield f"{path}{name}", part
        yield from fields(part, f"{path}{name}.")
        yield from fields(part.get("items", {}), f"{path}{name}[].")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return structural_schema(JobConfig, defaults=True)


@pytest.mark.slow
def test_every_field_is_described_and_bounded(schema) -> None:
    """`kubectl explain` has a text for it, and no number, text or list has any size."""
    for path, part in fields(schema):
        assert part["description"], path
        if part["type"] in ("integer", "number"):
            assert {"minimum", "exclusiveMinimum"} & set(part), path
            assert "maximum" in part, path
        if part["type"] == "string":
            assert {"maxLength", "enum"} & set(part), path
        if part["type"] == "array":
            assert "maxItems" in part, path


def test_every_field_of_the_configuration_is_in_the_schema(schema) -> None:
    """A TrainingJob can ask for whatever the trainer can do."""
    assert len(schema["properties"]) == len(JobConfig.model_fields)
    assert required_fields(JobConfig) == ["total_steps", "pipeline"]
    assert required_fields(PipelineConfig) == ["max_stages"]


OPTIONAL = {"a", "b.c"}


@pytest.mark.parametrize(
    ("condition", "cel"),
    [
        (at("x") <= at("y"), "self.x <= self.y"),
        (at("a") < 3, "!has(self.a) || self.a < 3"),
        (at("b.c") != "it's", "!has(self.b.c) || self.b.c != 'it\\'s'"),
        ((at("x") % 2 == 0) & (at("y") == True), "(self.x % 2 == 0 && self.y == true)"),  # noqa: E712
        (given("a") | (at("x") == 0.0), "has(self.a) || self.x == 0.0"),
        (absent("b.c") | (at("x") == 1), "!has(self.b.c) || self.x == 1"),
        (at("x").is_not_in(["m", "n"]), "!(self.x in ['m', 'n'])"),
        (
            AtDefaults((("x", 3), ("a", ()), ("b.c", None))),
            "(self.x == 3 && (!has(self.a) || self.a.size() == 0) && !has(self.b.c))",
        ),
        (Items("a", 1) & at("x").is_in([2]), "((!has(self.a) || self.a.all(x, x == 1)) && self.x in [2])"),
    ],
)
def test_a_condition_as_cel(condition: Any, cel: str) -> None:
    """Fields that may be missing are asked for first."""
    rule = Rule(condition=condition, field="x", reason="wrong", fix="change it")
    assert cel_rule(rule, lambda path: path in OPTIONAL) == cel


def rules(schema: dict[str, Any], field: str) -> list[str]:
    return [
        entry["rule"] for entry in schema["x-kubernetes-validations"] if entry["fieldPath"] == f".{field}"
    ]


def test_a_field_that_the_api_server_fills_in_is_not_asked_for(schema) -> None:
    """Each field that CEL reads costs the API server. Fields of an object that is there are filled in."""
    (joined,) = [
        entry["rule"]
        for entry in schema["x-kubernetes-validations"]
        if entry["rule"].startswith("!has(self.repack)")
    ]
    condition = "self.repack.minStages == 1 || self.repack.minStages <= self.pipeline.maxStages"
    assert joined.startswith(f"!has(self.repack) || ({condition}) && (")
    assert rules(schema["properties"]["pipeline"], "minStages") == ["self.minStages <= self.maxStages"]
    repack = schema["properties"]["repack"]
    assert rules(repack, "targetStages") == [
        "!has(self.targetStages) || self.minStages <= self.targetStages",
        "!has(self.targetStages) || self.enabled == true",
    ]


def test_an_object_that_is_left_out_is_not_filled_in(schema) -> None:
    """The API server stores, checks and sends what a job says; each field of an object has its default."""
    parts = schema["properties"]
    objects = {name: part for name, part in parts.items() if part["type"] == "object"}
    assert objects
    assert not [name for name, part in objects.items() if "default" in part]
    assert parts["training"]["properties"]["learningRate"]["default"] == 0.001


def test_a_condition_that_cel_cannot_express() -> None:
    """Is left to the operator's condition."""
    rule = Rule(condition=lambda config: True, field="x", reason="wrong", fix="change it")
    assert cel_rule(rule, lambda path: False) is None


def test_rules_that_ask_for_one_field_first_are_one(schema) -> None:
    """Each field that a rule reads costs the API server, also where the job does not have it."""
    firsts = collections.Counter(
        entry["rule"].split(" || ")[0] for entry in schema["x-kubernetes-validations"]
    )
    assert firsts["!has(self.repack)"] == firsts["!has(self.parallelism)"] == firsts["has(self.model)"] == 1


def test_a_rule_about_the_object_before_an_update_is_not_joined() -> None:
    """On create the API server skips a rule that reads ``oldSelf``, with all that is in it."""

    class Part(ApiModel):
        RULES = tuple(
            Rule(condition=Cel(f"!has(self.size) || {cel}"), field="size", reason="wrong", fix="change it")
            for cel in ("self.size == oldSelf.size", *(f"self.size != {number}" for number in range(4)))
        )
        size: int | None = None
        """Gigabytes."""

    alone, joined = sorted(
        (entry["rule"] for entry in structural_schema(Part, defaults=True)["x-kubernetes-validations"]),
        key=len,
    )
    assert alone == "!has(self.size) || self.size == oldSelf.size"
    assert "oldSelf" not in joined and joined.count("has(") == 1
