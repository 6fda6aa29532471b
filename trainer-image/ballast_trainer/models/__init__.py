"""Models as lists of layers, and the two functions a model of your own needs."""
