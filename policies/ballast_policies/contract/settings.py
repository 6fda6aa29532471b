"""What a field of a configuration may hold, stated once: bounds, pattern, known names, rules over fields.

``setting(8, ge=1, le=65_536)`` declares a field of a :class:`Settings` dataclass.  From these facts come the
checks here, the schema of the TrainingJob (``ballast_operator.api.schema.settings_schema``) and its
page in the docs; the text under a field is its description in both.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

from ballast_policies.contract.errors import ContractError, Problem, camel, shown
from ballast_policies.contract.rules import Rule
from ballast_policies.registry import Registry, RegistryError

REQUIRED: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What holds of a field, beyond its type.

    Attributes:
        ge, gt, le: bounds of a number, or of each number of a list.
        min_length, max_length: of a text or a list.
        pattern: regular expression that matches the whole text.
        form: the pattern for people, e.g. ``module:callable``.
        registry: the text is a name in it.
        usable: whether the field takes the name of a row of the registry; None: all.
        key: the field of each item that no two items of the list share.
        immutable: why a TrainingJob's field cannot change; empty: it can.
        required_in_cluster: a TrainingJob has to set it; the trainer alone has a default.
        required_with: a TrainingJob that has this field (of the whole configuration) has to set it, too.
        cluster_pattern, cluster_form: in place of ``pattern`` and ``form`` in a TrainingJob.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str = ""
    form: str = ""
    registry: Registry[Any] | None = None
    usable: Callable[[Any], bool] | None = None
    key: str = ""
    immutable: str = ""
    required_in_cluster: bool = False
    required_with: str = ""
    cluster_pattern: str = ""
    cluster_form: str = ""

    def own_names(self) -> tuple[str, ...]:
        """Ballast's own names that the field takes."""
        if self.registry is None:
            return ()
        rows = self.registry.builtin.items()
        return tuple(name for name, row in rows if self.usable is None or self.usable(row))


NO_FACTS = Facts()


def setting(default: Any = REQUIRED, **facts: Any) -> Any:
    """A field of a configuration; ``facts`` are those of :class:`Facts`. A type as default is called."""
    metadata = {"facts": Facts(**facts)}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(field: "dataclasses.Field[Any]") -> Facts:
    """What holds of the field."""
    facts: Facts = field.metadata.get("facts", NO_FACTS)
    return facts


class Settings:
    """Base of a part of a configuration: refuses values that its fields' facts and its rules do not allow."""

    __slots__ = ()

    RULES: ClassVar[tuple[Rule, ...]] = ()

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ContractError: with every problem; paths are relative to this part.
        """
        problems = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            reason = field_problem(field, getattr(self, field.name))
            if reason:
                problems.append(Problem(camel(field.name), reason))
        if not problems:
            broken = [found for rule in self.RULES if (found := rule.problem(self)) is not None]
            # One problem for each field is enough to begin with.
            problems = list({problem.path: problem for problem in reversed(broken)}.values())[::-1]
        if problems:
            raise ContractError(problems)


def cluster_problems(
    kind: type[Settings], given: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> list[Problem]:
    """What a TrainingJob has to set beyond what the trainer needs: the operator plans gangs by it.

    Args:
        kind: of the configuration.
        given: its JSON, before defaults are filled in.
        whole: that of the whole configuration; None: ``given`` is it.
    """
    problems = []
    whole = given if whole is None else whole
    hints = _hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        facts, key = facts_of(field), camel(field.name)
        value = given.get(key)
        needed = facts.required_with and whole.get(camel(facts.required_with)) is not None
        if (facts.required_in_cluster or needed) and value is None:
            problems.append(Problem(key, "missing. To fix: give it a value"))
        pattern = facts.cluster_pattern
        if pattern and isinstance(value, str) and re.fullmatch(pattern, value) is None:
            problems.append(Problem(key, f"{shown(value)} is not {facts.cluster_form}"))
        part, inside = hints[field.name], {} if value is None else value
        if isinstance(part, type) and issubclass(part, Settings) and isinstance(inside, Mapping):
            problems += [problem.below(key) for problem in cluster_problems(part, inside, whole)]
    return problems


_HINTS: dict[type, Mapping[str, Any]] = {}


def _hints(kind: type[Settings]) -> Mapping[str, Any]:
    """Field -> type; resolving the names would take most of a check's time."""
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]


def field_problem(field: "dataclasses.Field[Any]", value: Any) -> str:
    """Why the field cannot have the value; empty: it can."""
    facts = facts_of(field)
    if facts is NO_FACTS or value is None:
        return ""
    if isinstance(value, tuple):
        return _list_problem(facts, value)
    if isinstance(value, str):
        return _text_problem(facts, value)
    if isinstance(value, int | float):
        return _number_problem(facts, value)
    return ""


def _number_problem(facts: Facts, value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a number. To fix: {_range(facts)}"
    if facts.ge is not None and value < facts.ge:
        return f"{shown(value)} is below {facts.ge:g}. To fix: {_range(facts)}"
    if facts.gt is not None and value <= facts.gt:
        return f"{shown(value)} is not above {facts.gt:g}. To fix: {_range(facts)}"
    if facts.le is not None and value > facts.le:
        return f"{shown(value)} is above {facts.le:.16g}. To fix: {_range(facts)}"
    return ""


def _range(facts: Facts) -> str:
    low = f"above {facts.gt:g}" if facts.gt is not None else f"{facts.ge:g}" if facts.ge is not None else ""
    if facts.le is None or facts.le >= 2**31 - 1:
        return low if facts.gt is not None else f"{low} or more"
    return f"{low} to {facts.le:.16g}" if low else f"at most {facts.le:.16g}"


def _text_problem(facts: Facts, value: str) -> str:
    if facts.min_length is not None and len(value) < facts.min_length:
        return f"{value!r} is shorter than {facts.min_length} characters. To fix: a longer text"
    if facts.max_length is not None and len(value) > facts.max_length:
        text = f"{value[:40]!r}... has {len(value)} characters, above {facts.max_length}"
        return f"{text}. To fix: a shorter text"
    if facts.pattern and re.fullmatch(facts.pattern, value) is None:
        form = facts.form or f"matched by {facts.pattern}"
        return f"{value!r} is not {form}" + ("" if "To fix: " in form else ". To fix: such a text")
    if facts.registry is not None:
        return _name_problem(facts, facts.registry, value)
    return ""


def _name_problem(facts: Facts, registry: Registry[Any], value: str) -> str:
    """Names of other distributions are known to the registry alone."""
    own = facts.own_names()
    if value in own:
        return ""
    if value in registry.builtin or (value not in registry and value not in registry.refused):
        return f"{value!r} {not_among(value, own)}"
    try:
        row = registry.find(value)
    except RegistryError as error:
        return str(error)
    usable = facts.usable is None or facts.usable(row)
    return "" if usable else f"{value!r} cannot be used here. To fix: one of {', '.join(own)}"


def _list_problem(facts: Facts, value: Sequence[Any]) -> str:
    if facts.max_length is not None and len(value) > facts.max_length:
        return f"{len(value)} entries, above {facts.max_length}. To fix: fewer"
    if facts.key:
        keys = [getattr(item, facts.key) for item in value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            return f"{str(twice[0])!r} is given twice. To fix: give each {camel(facts.key)} once"
    for item in value:
        reason = _number_problem(facts, item) if isinstance(item, int | float) else ""
        if reason:
            return reason
    return ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """``one of a, b``, and the nearest of them where one is near; letters' case does not count."""
    names = list(known)
    return f"one of {', '.join(map(str, names))}{_nearest(name, names)}"


def not_among(name: str, known: Iterable[str]) -> str:
    """``is not one of a, b``, and what to change."""
    names = list(known)
    return f"is not one of {', '.join(map(str, names))}. To fix: one of these{_nearest(name, names)}"


def _nearest(name: str, names: Iterable[str]) -> str:
    by_case = {str(other).lower(): str(other) for other in names}
    near = difflib.get_close_matches(name.lower(), by_case, n=1)
    return f"; did you mean {by_case[near[0]]!r}?" if near else ""
