"""Every decision of Ballast, as pure functions of values."""
