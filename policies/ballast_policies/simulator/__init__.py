"""Both loops, over a trace."""
