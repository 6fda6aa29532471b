"""What the command line shows of a live cluster: read once, turned into a value, rendered elsewhere."""
