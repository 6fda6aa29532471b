"""Which layers on which stage, which stage on which rank."""
