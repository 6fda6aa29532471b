"""Simulations on arrays: Gavel's rules, whole rounds of large clusters, pairs of jobs, ideal shares."""
