"""Carries out job decisions on GPUs."""
