"""The `ballast` command line: parse, call one function, render its value."""
