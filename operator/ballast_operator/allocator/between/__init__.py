"""What the allocator gives between two decisions."""
