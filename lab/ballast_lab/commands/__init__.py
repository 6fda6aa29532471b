"""What the commands of ``ballast`` reach here, by the entry points of group ``ballast.simulations``."""
