"""How rank 0 and the operator talk: plans one way; reports, proposals and acknowledgements the other."""
