"""Measurement of the costs of layers, links and steps in the running job."""
