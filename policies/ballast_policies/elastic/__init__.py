"""Elastic jobs: how many GPUs of which type each of them gets, now."""
