"""Base of the contract's values: frozen pydantic models, strict, with one JSON form in camelCase.

Beyond types and bounds, a field says by marks of its annotation what holds of it: a name of a registry
(:class:`Named`), a text of a form (:class:`Form`), items with a key of their own (:class:`Keyed`), and what a
TrainingJob asks beyond the trainer (:class:`InCluster`).  From these come the checks here, the schema of the
TrainingJob (``ballast_operator.api.schema``) and its page in the docs; the text under a field is its
description in both.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from ballast_policies.contract.conditions import Rule
from ballast_policies.contract.decode import STRICT, decode_text, problems_of
from ballast_policies.contract.errors import ContractError, Problem, camel, not_among
from ballast_policies.contract.limits import MESSAGE, Limits, value_deeper
from ballast_policies.registry import Registry, RegistryError


class Model(BaseModel):
    """A message, or a part of one.

    On reading, keys that are not known are ignored, so that an operator and a trainer one release apart
    understand each other.
    """

    model_config = ConfigDict(**STRICT, alias_generator=camel)

    LIMITS: ClassVar[Limits] = MESSAGE

    def to_dict(self, *, without_none: bool = False) -> dict[str, Any]:
        """JSON's fields; ``without_none``: fields that are None are left out, as Kubernetes does."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=without_none)

    def to_json(self) -> str:
        """One line of JSON with sorted keys, so that equal values are equal bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the value back.

        Raises:
            ContractError: the text is not JSON or above :attr:`LIMITS`, or a field is missing or has a wrong
                type or value.
        """
        return decode_text(cls, text, unknown="ignore", path=cls.__name__, limits=cls.LIMITS)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some fields, checked like any.

        Raises:
            ContractError: the values do not fit.
        """
        try:
            return type(self)(**{**dict(self), **changes})
        except ValidationError as error:
            raise ContractError(problems_of(type(self), error)) from error


class Settings(Model):
    """A part of a configuration, with rules over several of its fields."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules of the class itself; those of its base classes hold, too."""

    def to_dict(self, *, without_none: bool = True) -> dict[str, Any]:
        """JSON's fields: camelCase, defaults filled in, without what is not set."""
        return super().to_dict(without_none=without_none)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [found for rule in _rules(type(self)) if (found := rule.problem(self)) is not None]
        if broken:
            # One problem for each field is enough to begin with.
            raise ContractError(list({problem.path: problem for problem in reversed(broken)}.values())[::-1])
        return self


@functools.cache
def _rules(kind: type[Settings]) -> tuple[Rule, ...]:
    return tuple(rule for each in reversed(kind.__mro__) for rule in each.__dict__.get("RULES", ()))


class _Mark:
    """A check of a field, beside its type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        reason = self.reason(value)
        if reason:
            raise ContractError(reason)
        return value

    def reason(self, value: Any) -> str:
        """Reason that the field cannot have the value; empty: it can."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Form(_Mark):
    """A text that a pattern matches as a whole; ``form``: the pattern for people, and what to write."""

    pattern: str
    form: str

    def __get_pydantic_json_schema__(
        self, of_text: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(of_text), "pattern": self.pattern}

    def reason(self, value: str) -> str:
        """Match it."""
        return "" if re.fullmatch(self.pattern, value) else f"{value!r} is not {self.form}"


@dataclasses.dataclass(frozen=True, slots=True)
class Named(_Mark):
    """The name of a row of a registry; ``usable``: whether the field takes it, None: all."""

    registry: Registry[Any]
    usable: Callable[[Any], bool] | None = None

    def own_names(self) -> tuple[str, ...]:
        """Ballast's own names that the field takes."""
        return self.registry.own() if self.usable is None else self.registry.own(self.usable)

    def reason(self, value: str) -> str:
        """Names of other distributions are known to the registry alone."""
        own, registry = self.own_names(), self.registry
        if value in own:
            return ""
        if value in registry.builtin or (value not in registry and value not in registry.refused):
            return f"{value!r} {not_among(value, own)}"
        try:
            row = registry.find(value)
        except RegistryError as error:
            return str(error)
        usable = self.usable is None or self.usable(row)
        return "" if usable else f"{value!r} cannot be used here. To fix: one of {', '.join(own)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Keyed(_Mark):
    """A list of which no two items have the same ``key``."""

    key: str

    def reason(self, value: tuple[Any, ...]) -> str:
        """Compare them."""
        keys = [getattr(item, self.key) for item in value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        return f"{str(twice[0])!r} is given twice. To fix: give each {camel(self.key)} once" if twice else ""


def _shallow(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in arguments.items():
        if value_deeper(value, MESSAGE.depth):
            reason = f"nested deeper than {MESSAGE.depth} levels. To fix: fewer levels"
            raise ContractError(Problem(name, reason))
    return arguments


Arguments = Annotated[Mapping[str, Any], AfterValidator(_shallow)]
"""Arguments of a callable by name: anything that JSON has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InCluster:
    """Requirements of a TrainingJob on the field, beyond the trainer's.

    Attributes:
        required: it has to be set; the trainer alone has a default.
        required_with: a TrainingJob that has this field (of the whole configuration) has to set it, too.
        immutable: why it cannot change; empty: it can.
        left_open: the API server does not fill in the default: whether the field is set means something.
        form: in place of the field's own.
    """

    required: bool = False
    required_with: str = ""
    immutable: str = ""
    left_open: bool = False
    form: Form | None = None


def mark_of(kind: type[Model], name: str, mark: type[Any]) -> Any:
    """The mark of this type of a field; None: it has none."""
    return next((each for each in kind.model_fields[name].metadata if isinstance(each, mark)), None)


def cluster_problems(
    kind: type[Model], given: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """Fields that a TrainingJob has to set beyond what the trainer needs: the operator plans gangs by them.

    Args:
        kind: of the configuration.
        given: its JSON, before defaults are filled in.
        whole: that of the whole configuration; None: ``given`` is it.
    """
    whole = given if whole is None else whole
    for key, asked, part in _asked(kind):
        value = given.get(key)
        needed = asked.required_with and whole.get(camel(asked.required_with)) is not None
        if (asked.required or needed) and value is None:
            yield Problem(key, "missing. To fix: give it a value")
        if asked.form is not None and isinstance(value, str) and asked.form.reason(value):
            yield Problem(key, asked.form.reason(value))
        inside = {} if value is None else value
        if part is not None and isinstance(inside, Mapping):
            yield from (problem.below(key) for problem in cluster_problems(part, inside, whole))


@functools.cache
def _asked(kind: type[Model]) -> tuple[tuple[str, InCluster, type[Model] | None], ...]:
    """Key, what is asked of it, and its model of the fields of which something is asked, or of a part."""
    found = []
    for name, field in kind.model_fields.items():
        asked, part = mark_of(kind, name, InCluster), field.annotation
        inside = part if isinstance(part, type) and issubclass(part, Model) and _asked(part) else None
        if asked is not None or inside is not None:
            found.append((camel(name), asked or InCluster(), inside))
    return tuple(found)
