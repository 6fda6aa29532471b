"""Checkpoints: atomic writes, verified reads, and a lock against other runs."""
