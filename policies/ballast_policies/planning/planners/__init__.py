"""Planners of whole plans: ``best``, PipeDream, 2BW, PTD-P, AMP, and the one cost model that judges them."""
