"""Prices, costs and budgets: parts of both resources."""
