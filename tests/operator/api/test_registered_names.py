"""Names that only the operator can judge: policies of other distributions, and functions."""

import pytest
from ballast_operator.api.read import InvalidObject, read_cluster_policy
from ballast_policies.allocation.registry import POLICIES

from tests.operator.api.objects import POLICY, changed
from tests.support.distributions import install


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """A distribution with one policy that works and one that cannot be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    works = "from ballast_policies.allocation.registry import POLICIES\nPOLICY = POLICIES['makespan']\n"
    install(
        tmp_path,
        "acme",
        "ballast.policies",
        {"acme.works": "acme_works:POLICY", "acme.broken": "acme_is_broken:POLICY"},
        {"acme_works": works, "acme_is_broken": "raise RuntimeError('no licence')"},
    )
    POLICIES.rescan()
    yield
    monkeypatch.undo()
    POLICIES.rescan()


def chosen(policy):
    return read_cluster_policy(changed(POLICY, "spec.objective.policy", policy)).spec.objective.policy


def test_a_policy_of_an_installed_distribution_can_be_chosen(distribution):
    assert chosen("acme.works") == "acme.works"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("acme.broken", "of acme 1.2"),
        ("acme.broken", "RuntimeError: no licence"),
        ("acme.unknown", "is not one of max-min-fairness"),
        ("gandiva", "puts any two jobs on the same GPUs"),
        ("my policies:fair", "is not module:function"),
    ],
)
def test_another_one_is_refused_with_field_and_reason(distribution, policy, said):
    """As the condition Valid shows it."""
    with pytest.raises(InvalidObject) as caught:
        chosen(policy)
    assert said in str(caught.value)
    assert "spec.objective.policy" in str(caught.value)


def test_a_function_is_taken_by_its_form():
    """Whether it exists, the solver's process finds out: nothing is imported here."""
    assert chosen("no_such_module_at_all:fair") == "no_such_module_at_all:fair"
