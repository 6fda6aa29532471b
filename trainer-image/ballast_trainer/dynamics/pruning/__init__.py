"""Pruning of weights, neurons and heads."""
