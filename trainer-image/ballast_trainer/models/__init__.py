"""Models as lists of layers, and the interface of user-defined models."""
