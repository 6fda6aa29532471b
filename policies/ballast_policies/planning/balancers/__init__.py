"""Balancers: exact, fewest moves, slow links, mixed GPUs, fewer ranks, DeepSpeed's rule."""
