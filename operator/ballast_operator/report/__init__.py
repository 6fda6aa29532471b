"""Reports of the command line on a live cluster: read once, turned into a value, rendered elsewhere."""
