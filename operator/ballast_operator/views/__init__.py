"""What a pass of the operator sees: immutable values read once from the caches."""
