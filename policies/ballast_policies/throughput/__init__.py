"""What runs how fast where."""
