"""Whole decisions: which jobs run where, from the cluster's state, by one policy."""
