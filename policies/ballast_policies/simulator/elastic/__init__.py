"""Simulation of elastic jobs: rounds in which each job has one of its configurations."""
