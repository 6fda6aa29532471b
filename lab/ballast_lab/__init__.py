"""Reproductions of other people's results: it registers itself by entry points, and nothing imports it."""
