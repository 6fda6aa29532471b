"""What the parsers of price and availability logs raise."""


class PriceLogError(ValueError):
    """A log cannot be used; the text names the file, the value and the reason."""
