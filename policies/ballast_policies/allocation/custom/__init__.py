"""Policies that users write: an objective and constraints in cvxpy, over shares and throughputs."""
