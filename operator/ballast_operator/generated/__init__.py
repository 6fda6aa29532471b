"""Files of the repository that are made from the code: ``python -m ballast_operator.generated`` writes them.

Not part of the installed product; a test compares what is committed with what is made.
"""

from collections.abc import Mapping
from pathlib import Path

from ballast_operator.api.rbac import kueue_rules, operator_rules, page_rules, people_roles
from ballast_operator.api.schema.crd import crd_files, to_yaml
from ballast_operator.generated.tables import (
    api_reference,
    balancers_table,
    chart_readme,
    dynamics_table,
    methods_table,
    planners_table,
    policies_table,
    schedules_table,
    specification,
)

ROOT = Path(__file__).resolve().parents[3]
"""Of the repository."""

_SECTIONS = {
    "docs/policies.md": {
        "policies": policies_table(),
        "specification": specification(),
        "methods": methods_table(),
    },
    "docs/planning.md": {
        "planners": planners_table(),
        "balancers": balancers_table(),
        "schedules": schedules_table(),
    },
    "docs/trainer-changes.md": {"dynamics": dynamics_table()},
}
"""Pages that people write, with tables that are made: path -> name of the section -> text."""

_CHART = "charts/ballast/files"
_HEADER = "# Generated from ballast_operator.api.rbac by `make generate`. Edit that.\n"


def generated_files() -> Mapping[str, str]:
    """Path below the repository's root -> text."""
    files = {}
    for name, text in crd_files().items():
        files[f"crds/{name}"] = text
        files[f"{_CHART}/crds/{name}"] = text
    files[f"{_CHART}/rbac/operator-rules.yaml"] = _HEADER + to_yaml(operator_rules())
    files[f"{_CHART}/rbac/page-rules.yaml"] = _HEADER + to_yaml(page_rules())
    files[f"{_CHART}/rbac/kueue-rules.yaml"] = _HEADER + to_yaml(kueue_rules())
    files[f"{_CHART}/rbac/people-roles.yaml"] = _HEADER + to_yaml(people_roles())
    files["docs/api.md"] = api_reference()
    files["charts/ballast/README.md"] = chart_readme((ROOT / "charts/ballast/values.yaml").read_text())
    for name, sections in _SECTIONS.items():
        files[name] = with_sections((ROOT / name).read_text(), sections)
    return files


def with_sections(text: str, sections: Mapping[str, str]) -> str:
    """The page with the parts between its marks ``<!-- generated: NAME -->`` and ``<!-- end -->`` replaced.

    Raises:
        LookupError: the page lacks the marks of a section.
    """
    for name, content in sections.items():
        begin, end = f"<!-- generated: {name} -->\n\n", "\n\n<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise LookupError(
                f"the page has no {begin.strip()} ... {end.strip()}. To fix: put them around it"
            )
        text = f"{before}{begin}{content}{end}{after}"
    return text
