"""Matching of jobs to places in the queues of GPUs."""
