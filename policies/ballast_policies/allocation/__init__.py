"""Allocation: the share of time of each job on each GPU type."""
