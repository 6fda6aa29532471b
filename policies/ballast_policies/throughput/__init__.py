"""Speeds of jobs on GPU types: tables, measurements, and estimates of what was never seen."""
