"""The channel between rank 0 and the operator: plans in; reports, proposals and acknowledgements out."""
