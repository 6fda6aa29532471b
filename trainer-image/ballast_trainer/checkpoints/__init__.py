"""Checkpoints: written whole, verified when read, kept apart from those of other runs."""
