"""``ballast plan``."""
