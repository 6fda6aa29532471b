"""Which jobs run when and where: rounds on arrays, rounds of the operator, and the fluid baseline."""
