"""What has to hold of several fields of a configuration together."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ballast_policies.contract.conditions import Condition, at
from ballast_policies.contract.errors import Problem, camel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What has to hold of several fields together.

    Attributes:
        condition: a :class:`Condition`, or a function where CEL cannot express it: then the API server does
            not check it, and the operator's condition reports it.
        field: path of the field to change, in Python's spelling, below the configuration the rule is on;
            empty: that as a whole.
        reason: what is wrong where it does not hold.
        fix: what to change.
        explain: the configuration -> ``reason`` with its values, where the condition does not tell them.
    """

    condition: Condition | Callable[[Any], bool]
    field: str
    reason: str
    fix: str
    explain: Callable[[Any], str] | None = None

    @property
    def path(self) -> str:
        """The field in JSON's spelling."""
        return json_path(self.field)

    @property
    def message(self) -> str:
        """For the API server, which adds no values."""
        return f"{self.reason}. To fix: {self.fix}"

    def problem(self, of: Any) -> Problem | None:
        """What is wrong with a configuration, with the values that the rule read; None: it holds."""
        holds = self.condition.holds if isinstance(self.condition, Condition) else self.condition
        if holds(of):
            return None
        if self.explain is not None or not isinstance(self.condition, Condition):
            reason = self.reason if self.explain is None else self.explain(of)
            return Problem(self.path, f"{reason}. To fix: {self.fix}")
        values = {json_path(path): at(path).value(of) for path in dict.fromkeys(self.condition.fields())}
        if None in values.values():
            return None
        read = ", ".join(f"{path}: {value}" for path, value in values.items())
        return Problem(self.path, f"{self.reason}{f' ({read})' if read else ''}. To fix: {self.fix}")


def json_path(path: str) -> str:
    """A dotted path in JSON's spelling."""
    return ".".join(camel(name) for name in path.split("."))
