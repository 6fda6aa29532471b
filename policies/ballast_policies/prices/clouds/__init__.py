"""Answers of clouds' price lists, as prices of a GPU hour."""
