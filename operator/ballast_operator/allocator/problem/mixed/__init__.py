"""Gangs that may run in several pools at once, as the problem has them."""
