"""Rules that begin with the same part are one for the API server, which tells of each that does not hold."""

import pytest
from ballast_operator.api.schema.joined_rules import parts, with_joined_rules


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("self.a", ["self.a"]),
        ("self.a || self.b == 'x || (y'", ["self.a", "self.b == 'x || (y'"]),
        (
            "((!has(self.a) || self.a.size() == 0)) || has(self.b)",
            ["!has(self.a)", "self.a.size() == 0", "has(self.b)"],
        ),
        ("(self.a || self.b) && (self.c || self.d)", ["(self.a || self.b) && (self.c || self.d)"]),
        ("!(self.a in ['it\\'s', 'b)']) || self.c", ["!(self.a in ['it\\'s', 'b)'])", "self.c"]),
        ("!has(self.a) || self.a.all(x, x || self.b)", ["!has(self.a)", "self.a.all(x, x || self.b)"]),
    ],
)
def test_the_parts_of_which_one_has_to_hold(expression: str, found: list[str]) -> None:
    """What is inside a call or a text is none; brackets around a whole part mean nothing."""
    assert parts(expression) == found


def entry(rule: str, field: str = ".a") -> dict[str, str]:
    return {"rule": rule, "message": f"{rule} isn't so. To fix: change it", "fieldPath": field}


def test_rules_of_a_field_that_begin_alike_are_one() -> None:
    """The others stay as they are: those of other fields, with the old object, or of one part."""
    alone = [
        entry("!has(self.a) || self.d", ".d"),
        entry("!has(self.a)"),
        entry("!has(self.a) || self.a == oldSelf.a"),
        entry("self.b || !has(self.a)"),
    ]
    rules = [entry("!has(self.a) || self.b"), *alone, entry("(!has(self.a)) || self.c || self.d")]
    schema = {"type": "array", "items": {"type": "object", "x-kubernetes-validations": rules}}
    joined, *others = with_joined_rules(schema)["items"]["x-kubernetes-validations"]
    assert others == alone
    assert joined["rule"] == "!has(self.a) || ((self.b) && (self.c || self.d))"
    assert joined["fieldPath"] == ".a"
    assert joined["messageExpression"] == (
        "(((self.b) ? '' : '; !has(self.a) || self.b isn\\'t so. To fix: change it') + "
        "((self.c || self.d) ? '' : '; (!has(self.a)) || self.c || self.d isn\\'t so. To fix: change it'))"
        ".substring(2)"
    )
