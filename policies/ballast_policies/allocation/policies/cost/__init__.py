"""Policies that read prices."""
