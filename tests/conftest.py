"""Fixtures of all tests.  None is automatic: a test that names none of them starts nothing."""

import gc
import os
from collections.abc import Generator

# Several clusters start at once, on machines with other work: limits are for failures only.
os.environ.setdefault("BALLAST_PATIENCE", "5")
# Processes that tests start write their stacks where one of them hangs (tests/support/time_limits.py).
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# One thread a process, as with make: several would measure each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.support.control_plane import control_plane, namespace
from tests.support.examples import USUAL
from tests.support.gang import device_variables
from tests.support.time_limits import is_over, limited, now, stacks_of_children

__all__ = ["control_plane", "namespace"]

os.environ.update(device_variables("tests"))

# No deadlines: machines are shared. The same examples every time, so that a change is judged by itself; new
# ones are drawn by `scripts/stress-tests`, `make test-nightly` and `--hypothesis-profile=thorough`. A number
# is of tests that name none; the others have as many in proportion (tests/support/examples.py).
settings.register_profile(
    "ballast",
    max_examples=15,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# Of the fast tests: what more of the same examples would find, `make test` finds.
settings.register_profile("quick", settings.get_profile("ballast"), max_examples=10)
settings.register_profile("new", settings.get_profile("ballast"), derandomize=False)
settings.register_profile("nightly", settings.get_profile("new"), max_examples=USUAL)
settings.register_profile("thorough", settings.get_profile("new"), max_examples=2000)
settings.load_profile("ballast")

# Hundreds of modules are imported, and all that they define stays: the search for garbage in it is a third of
# the time that collecting takes.
gc.disable()

CLUSTERS = ("live_cluster", "control_plane", "cluster", "ballast")
"""Fixtures that start a cluster for all tests that name them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a cluster run in one worker of pytest-xdist, so that it is started once; they begin.

    What takes long begins first, so that no worker is left with it at the end (--no-loadscope-reorder).
    """
    for item in items:
        if item.config.getoption("timeout") is None:
            limited(item)
        group = group_of(item)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage is collected again, among what the tests make alone."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What this test starts begins from here on."""
    item.stash[BEGAN] = now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that waited too long says where the processes that it started were."""
    report = yield
    if call.excinfo is not None and is_over(call.excinfo.value):
        report.sections.append(("stacks of child processes", stacks_of_children(item.stash[BEGAN])))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """A cluster ends with the last test of its group: an idle one takes a tenth of a core from the others."""
    yield
    # Should a later test ask for it after all, it is started again.
    request = getattr(item, "_request", None)
    for name in CLUSTERS:
        if name in getattr(item, "fixturenames", ()) and name not in getattr(nextitem, "fixturenames", ()):
            request._arg2fixturedefs[name][-1].finish(request)


def group_of(item: pytest.Item) -> str | None:
    """The worker's group of a test that needs a cluster."""
    if item.get_closest_marker("e2e"):
        # Each has a whole cluster with trainers: one at a time, or they take each other's processors.
        return "e2e"
    fixtures = getattr(item, "fixturenames", ())
    return next((name for name in CLUSTERS if name in fixtures), None)


def turn(item: pytest.Item) -> int:
    """When a test's turn is: those with clusters, with processes of their own, the others."""
    group = group_of(item)
    if group is not None:
        return ("e2e", *CLUSTERS).index(group)
    slow = any(item.get_closest_marker(name) for name in ("api", "processes", "slow"))
    return len(CLUSTERS) + (1 if slow else 2)
