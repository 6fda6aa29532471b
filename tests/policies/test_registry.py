"""Rows that other distributions register: found by name, imported when asked for, refused with a reason."""

import sys

import pytest
from ballast_policies.allocation.policy import Policy
from ballast_policies.allocation.registry import POLICIES, allocate
from ballast_policies.registry import BrokenEntryError, UnknownNameError

from tests.support.distributions import install


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs made-up distributions, and forgets them at the end."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name, entries, **modules):
        install(tmp_path, name, "ballast.policies", entries, modules)
        POLICIES.rescan()

    yield put
    monkeypatch.undo()
    POLICIES.rescan()


def test_a_row_is_imported_when_it_is_first_asked_for(installed):
    """Its name is known before that, and looking for other names imports nothing either."""
    installed(
        "acme",
        {"acme.fair": "acme_fair:POLICY"},
        acme_fair="from ballast_policies.allocation.registry import POLICIES\n"
        "POLICY = POLICIES['max-min-fairness']\n",
    )
    assert "acme.fair" in POLICIES
    assert list(POLICIES)[-1] == "acme.fair"
    assert "acme_fair" not in sys.modules
    assert POLICIES["acme.fair"] is POLICIES["max-min-fairness"]
    assert "acme_fair" in sys.modules


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("", "has no attribute 'POLICY'"),
        ("POLICY = 3", "is of type int, not Policy"),
    ],
)
def test_a_broken_distribution_is_named_and_harms_no_other(installed, module, said):
    """The error has its name and version; the other policies solve as before."""
    installed("acme", {"acme.broken": "acme_broken:POLICY"}, acme_broken=module)
    sys.modules.pop("acme_broken", None)
    with pytest.raises(BrokenEntryError) as caught:
        POLICIES.find("acme.broken")
    assert said in str(caught.value)
    assert "acme 1.2" in str(caught.value)
    assert "To fix" in str(caught.value)
    assert isinstance(POLICIES.find("makespan"), Policy)


def test_a_name_without_a_prefix_is_refused(installed):
    """Also one of ours: no one replaces a policy by installing a distribution."""
    installed(
        "acme", {"makespan": "acme_own:POLICY", "quick": "acme_own:POLICY"}, acme_own="raise RuntimeError"
    )
    assert POLICIES.find("makespan") is POLICIES.builtin["makespan"]
    assert "acme 1.2" in POLICIES.refused["makespan"]
    with pytest.raises(UnknownNameError, match=r"of acme 1\.2 is not used.*acme\.quick"):
        POLICIES.find("quick")


def test_the_laboratorys_names_need_no_prefix(installed):
    """It is a distribution of Ballast's own."""
    row = "from ballast_policies.allocation.registry import POLICIES\nPOLICY = POLICIES['fifo']\n"
    installed("ballast-lab", {"reproduced": "reproduced_policy:POLICY"}, reproduced_policy=row)
    assert POLICIES.find("reproduced") is POLICIES["fifo"]


def test_a_name_that_two_distributions_register_is_refused(installed):
    """Both are named, neither is used."""
    installed("one", {"acme.fair": "acme_one:POLICY"}, acme_one="")
    installed("two", {"acme.fair": "acme_two:POLICY"}, acme_two="")
    assert "acme.fair" not in POLICIES
    with pytest.raises(UnknownNameError, match=r"one 1\.2, two 1\.2"):
        POLICIES.find("acme.fair")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(UnknownNameError, match=r"one of max-min-fairness, .*; did you mean 'makespan'\?"):
        POLICIES.find("MakeSpan")


def test_a_registered_function_solves(installed):
    """Ten lines of cvxpy and an entry point."""
    installed(
        "acme",
        {"acme.fair": "acme_cvxpy:POLICY"},
        acme_cvxpy="import cvxpy as cp\n"
        "from ballast_policies.allocation.custom import own_policy\n"
        "POLICY = own_policy(lambda cluster: cp.Maximize(cp.min(cluster.level)), summary='fair')\n",
    )
    from tests.policies.allocation.custom.problems import PROBLEM

    ours = allocate("max-min-fairness", PROBLEM)
    found = allocate("acme.fair", PROBLEM)
    assert found.objective == pytest.approx(ours.objective)
    assert found.gap == pytest.approx(0.0, abs=1e-6)
