"""Solvers: linear programs, prices of GPU types, and convex programs, each with a certified bound."""
