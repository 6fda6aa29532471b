"""Attention over the keys that the content chooses."""
