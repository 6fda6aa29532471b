"""The demo: three jobs on a mixed cluster, reported from the objects of the API server alone."""
