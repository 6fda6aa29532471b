"""Price and availability logs as a market, and the choice of what to rent in it.

Times are seconds since 1970-01-01 UTC; prices are USD per instance and hour unless a name states GPUs.
"""
