"""GPUs as their vendors state them, and the GPU that a node has by its labels."""
