"""Prices that change: what can be rented where, its price over time, and how often spot nodes are taken away.

Times are seconds since 1970-01-01 UTC; prices are USD per instance and hour unless a name states GPUs.
"""
