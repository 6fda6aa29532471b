"""Dynamic cases: changes of the model while it trains, which change the cost of its layers."""
