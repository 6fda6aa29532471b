"""Following costs that change: what layers are expected to cost, and when a look at the partition pays."""
