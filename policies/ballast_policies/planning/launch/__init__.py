"""The first stages of a gang, and whether its layers fit the GPUs."""
