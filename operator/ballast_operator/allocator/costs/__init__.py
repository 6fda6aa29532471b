"""Prices, the bill, budgets and forecasts of costs."""
