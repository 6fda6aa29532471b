"""Back ends: linear programs, prices, and programs that are not linear, each with a certified bound."""
