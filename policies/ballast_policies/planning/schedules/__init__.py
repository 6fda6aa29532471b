"""Pipeline schedules as data: builders, validation, simulation, idle time, exports.

A schedule is, for every rank, the order of its actions (``2F0``: stage 2, forward, microbatch 0).
"""
