"""Commands of ``ballast-train``, one file each."""
