"""Bytes that ranks of a pipeline hold: one formula for planners, launches, balancers and forecasts."""
