"""Containers as processes: their commands, runs, restarts and states."""
