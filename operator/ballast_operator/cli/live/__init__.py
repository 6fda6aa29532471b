"""Commands that read a live cluster: ``top``, ``explain``, ``whatif``."""
