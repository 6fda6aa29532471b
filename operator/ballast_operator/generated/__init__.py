"""Files of the repository that are made from the code: ``python -m ballast_operator.generated`` writes them.

Not part of the installed product; a test compares what is committed with what is made.
"""

from collections.abc import Mapping

from ballast_operator.api.crd import crd_files, to_yaml
from ballast_operator.api.rbac import operator_rules, people_roles
from ballast_operator.generated.api_reference import api_reference
from ballast_operator.generated.dashboards import dashboard_files

_CHART = "charts/ballast/files"
_HEADER = "# Generated from ballast_operator.api.rbac by `make generate`. Edit that.\n"


def generated_files() -> Mapping[str, str]:
    """Path below the repository's root -> text."""
    files = {}
    for name, text in crd_files().items():
        files[f"crds/{name}"] = text
        files[f"{_CHART}/crds/{name}"] = text
    files[f"{_CHART}/rbac/operator-rules.yaml"] = _HEADER + to_yaml(operator_rules())
    files[f"{_CHART}/rbac/people-roles.yaml"] = _HEADER + to_yaml(people_roles())
    for name, text in dashboard_files().items():
        files[f"{_CHART}/dashboards/{name}"] = text
    files["docs/api.md"] = api_reference()
    return files
