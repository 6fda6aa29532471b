"""Training data: the built-in corpus, and datasets, loaders and functions of the user."""
