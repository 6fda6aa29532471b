"""Schedules and simulated traces as text, pictures and files for other tools."""
