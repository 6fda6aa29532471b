"""``ballast allocate``."""
