"""The policies, one file each: the objective and its solution method."""
