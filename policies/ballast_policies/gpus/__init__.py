"""What vendors state of their GPUs, and which GPU a node has by its labels."""
