"""Simulations that the commands of ``ballast`` reach by the entry points of group ``ballast.simulations``."""
