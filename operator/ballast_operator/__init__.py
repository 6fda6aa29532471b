"""Carries out cluster decisions on Kubernetes."""
