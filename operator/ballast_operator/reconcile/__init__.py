"""The reconcile of one job: which change asks for it, what it does, and when it is repeated."""
