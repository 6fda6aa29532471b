"""nodeSelector and required node affinity, as kube-scheduler reads them."""

import pytest
from ballast_operator.views.node_constraints import read_requirements


def template(*terms: dict, selector: dict | None = None) -> dict:
    required = {"nodeSelectorTerms": list(terms)}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {"spec": {**({"affinity": affinity} if terms else {}), "nodeSelector": selector}}


def label(key: str, operator: str, *values: str) -> dict:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def name(operator: str, *values: str) -> dict:
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": list(values)}]}


LABELS = {"zone": "a", "disk": "ssd", "cores": "64"}

CASES = {
    "nothing is asked": (template(), True),
    "a label": (template(selector={"zone": "a", "disk": "ssd"}), True),
    "another value": (template(selector={"zone": "b"}), False),
    "no such label": (template(selector={"rack": "1"}), False),
    "in": (template(label("zone", "In", "a", "b")), True),
    "not in": (template(label("zone", "NotIn", "a")), False),
    "not in, no label": (template(label("rack", "NotIn", "1")), True),
    "exists": (template(label("disk", "Exists")), True),
    "does not exist": (template(label("disk", "DoesNotExist")), False),
    "greater": (template(label("cores", "Gt", "32")), True),
    "not greater": (template(label("cores", "Gt", "64")), False),
    "less than text": (template(label("zone", "Lt", "9")), False),
    "an unknown operator": (template(label("zone", "Like", "a")), False),
    "by name": (template(name("In", "n1")), True),
    "by another name": (template(name("NotIn", "n1")), False),
    "one of two terms": (template(label("zone", "In", "b"), name("In", "n1")), True),
    "both of a term": (template({**label("zone", "In", "a"), **name("In", "n2")}), False),
    "an empty term": (template({}), False),
    "selector and term": (template(label("zone", "In", "a"), selector={"disk": "hdd"}), False),
}


@pytest.mark.parametrize(("asked", "want"), CASES.values(), ids=CASES.keys())
def test_a_node_is_allowed_as_kube_scheduler_allows_it(asked, want):
    """Terms are alternatives, what stands in a term holds together, and the selector holds besides."""
    assert read_requirements(asked).allow("n1", LABELS) is want
