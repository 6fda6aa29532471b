"""The page: five screens of what the operator knows, served to people who log in. It never writes."""
