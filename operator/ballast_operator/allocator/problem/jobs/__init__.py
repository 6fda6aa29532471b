"""The jobs of a snapshot."""
