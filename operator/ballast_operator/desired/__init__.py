"""Builders of the objects a job owns: pure functions, a fresh value each call."""
