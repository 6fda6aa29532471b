"""The layers that a rank holds: parameters, optimizer state, precision, and their bytes on the wire."""
