"""Errors of the parsers of price and availability logs."""


class PriceLogError(ValueError):
    """A log cannot be used; the text names the file, the value and the reason."""
