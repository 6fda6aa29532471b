"""Schemas of the CustomResourceDefinitions, from the models."""
