"""Gavel's own versions of policies where ours do more, for comparison with its published figures."""
