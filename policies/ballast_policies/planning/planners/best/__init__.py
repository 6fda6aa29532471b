"""The best plan over every shape, placement and partition, with a bound."""
