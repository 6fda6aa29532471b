"""The loss on validation data, measured between two steps."""
