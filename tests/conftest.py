"""Fixtures of all tests.  None is automatic: a test that names none of them starts nothing."""

from ballast_localcluster.testing import control_plane, namespace

__all__ = ["control_plane", "namespace"]
