"""Tensor parallelism under stragglers: ZERO-resizing, lightweight migration, and SEMI, which combines both.

The decisions alone, as functions of measured seconds; the trainer carries them out.
"""
