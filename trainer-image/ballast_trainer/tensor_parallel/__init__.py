"""Layers cut over the ranks of a tensor group, and what is done about ranks of it that are late."""
