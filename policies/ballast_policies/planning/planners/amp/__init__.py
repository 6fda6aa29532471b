"""AMP: tensor, data and pipeline degrees, placement and layers on unlike devices and links."""
