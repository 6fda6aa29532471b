"""A job's costs, work done twice, budget and deadline."""
