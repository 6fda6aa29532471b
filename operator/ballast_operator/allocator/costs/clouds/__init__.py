"""Prices that are asked of clouds: one source for each, and the loop that asks them beside the decisions."""
