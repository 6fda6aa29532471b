"""Fixtures of all tests.  None is automatic: a test that names none of them starts nothing."""

import os

from hypothesis import HealthCheck, settings

from tests.support.control_plane import control_plane, namespace

__all__ = ["control_plane", "namespace"]

# No deadlines: machines are shared. In CI the same examples every time, so that a change is judged by itself;
# elsewhere new ones at each run, which is how rare cases are found.
settings.register_profile(
    "ballast",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ballast")
