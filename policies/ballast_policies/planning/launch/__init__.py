"""What a gang is launched with: whether its layers fit the GPUs, and its first stages."""
