"""What the operator's account may do: its code is held to it in memory, too."""

import itertools

from ballast_operator.api.rbac import kueue_rules, operator_rules
from ballast_operator.kube.kinds import Kind

RIGHTS = frozenset(
    (verb, group, resource)
    for rule in [*operator_rules(), *kueue_rules()]
    for verb, group, resource in itertools.product(rule["verbs"], rule["apiGroups"], rule["resources"])
)


def has_right(verb: str, kind: Kind, subresource: str = "") -> None:
    """Fail where the API server would answer 403."""
    group = kind.api_version.rpartition("/")[0]
    resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
    allowed = (verb, group, resource) in RIGHTS
    assert allowed, f"the operator may not {verb} {resource} of {group!r}"
