"""Kinds of change while training; each changes what layers cost."""
