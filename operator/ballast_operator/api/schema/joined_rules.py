"""Rules that most objects pass by the same part are one: the API server reads once what decides them.

Each field that a rule reads costs the API server copies of all fields beside it, on every create and on every
write of a status. Five rules that all begin with ``!has(self.dynamics)`` read one where they are joined.
"""

from collections.abc import Iterator
from typing import Any

from ballast_operator.api.schema.cel import literal
from ballast_operator.api.schema.structural import Schema

_RULES = "x-kubernetes-validations"
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def with_joined_rules(schema: Schema) -> Schema:
    """The schema with one rule for those of an object that name the same field and begin with the same part.

    The API server tells which of them do not hold, each in its own words.
    """
    found = dict(schema)
    if "properties" in schema:
        found["properties"] = {name: with_joined_rules(part) for name, part in schema["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            found[inner] = with_joined_rules(schema[inner])
    if _RULES in schema:
        found[_RULES] = _joined(schema[_RULES])
    return found


def _joined(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group stands where its first rule stood."""
    groups: dict[tuple[str, str], list[tuple[dict[str, Any], list[str]]]] = {}
    for number, rule in enumerate(rules):
        first, *rest = parts(rule["rule"])
        alone = not rest or "oldSelf" in rule["rule"]
        key = (f"{number}", "") if alone else (rule.get("fieldPath", ""), first)
        groups.setdefault(key, []).append((rule, rest))
    return [
        group[0][0] if len(group) == 1 else _one_rule(field, first, group)
        for (field, first), group in groups.items()
    ]


def _one_rule(field: str, first: str, group: list[tuple[dict[str, Any], list[str]]]) -> dict[str, Any]:
    rests = [" || ".join(rest) for _, rest in group]
    # As one text from texts: for the API server, lists that are filtered and joined might cost any amount.
    messages = [
        f"(({rest}) ? '' : {literal('; ' + rule['message'])})"
        for rest, (rule, _) in zip(rests, group, strict=True)
    ]
    return {
        "rule": f"{first} || ({' && '.join(f'({rest})' for rest in rests)})",
        "message": f"{field.lstrip('.') or 'the object'} does not go with other fields. "
        "To fix: see its rules in the API reference",
        "messageExpression": f"({' + '.join(messages)}).substring(2)",
        **({"fieldPath": field} if field else {}),
    }


def parts(expression: str) -> list[str]:
    """The parts of an expression of CEL of which one has to hold, without the brackets around them."""
    found = list(_split(expression))
    if len(found) > 1:
        return [inner for part in found for inner in parts(part)]
    (only,) = found
    return parts(only[1:-1]) if _is_bracketed(only) else [only]


def _split(expression: str) -> Iterator[str]:
    """At each ``||`` outside of brackets."""
    begin = 0
    for at, level in _levels(expression):
        if level == 0 and expression.startswith("||", at):
            yield expression[begin:at].strip()
            begin = at + 2
    yield expression[begin:].strip()


def _is_bracketed(expression: str) -> bool:
    """Whether the bracket that it begins with ends it."""
    if not expression.startswith("("):
        return False
    return all(level > 0 for at, level in _levels(expression) if at < len(expression) - 1)


def _levels(expression: str) -> Iterator[tuple[int, int]]:
    """(position, brackets that are open after it) of each character outside of texts."""
    level, quoted, escaped = 0, False, False
    for at, character in enumerate(expression):
        if quoted:
            quoted, escaped = character != "'" or escaped, character == "\\" and not escaped
        elif character == "'":
            quoted = True
        else:
            level += _BRACKETS.get(character, 0)
            yield at, level
