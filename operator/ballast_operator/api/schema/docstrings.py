"""The text that stands under a field or an enum's member: its description in schemas and in docs/api.md."""

import ast
import functools
import inspect
import textwrap
from typing import Any


@functools.cache
def field_docs(kind: Any) -> dict[str, str]:
    """Field of a dataclass -> the text under it; fields without one are left out."""
    return {name: text for name, text in _documented(kind).items() if text}


def member_docs(values: type[Any]) -> dict[str, str]:
    """Value of an enum -> the text under its member.

    Raises:
        LookupError: a member has none.
    """
    documented = _documented(values)
    for name, text in documented.items():
        if not text:
            raise LookupError(f"{values.__name__}.{name} has no docstring. To fix: write one below it")
    return {values[name].value: text for name, text in documented.items()}


def _documented(kind: type[Any]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    documented: dict[str, str] = {}
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        else:
            continue
        if isinstance(target, ast.Name) and (isinstance(statement, ast.AnnAssign) or target.id != "RULES"):
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            documented[target.id] = str(after.value.value) if described else ""  # type: ignore[union-attr]
    return documented
