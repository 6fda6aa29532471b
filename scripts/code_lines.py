#!/usr/bin/env python3
"""Lines of files without blank ones, comments and docstrings: ``code_lines.py FILE[:FUNCTION] ...``.

How docs/comparison.md counts what a user writes for a job, with Ballast and with others.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
}


def code_lines(path: Path, function: str = "") -> int:
    """Lines of a file, or of one of its functions; of YAML, TOML and JSON those that are no comment."""
    text = path.read_text()
    if path.suffix != ".py":
        return sum(not line.lstrip().startswith("#") for line in text.splitlines() if line.strip())
    tree = ast.parse(text)
    part = next(
        (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function), None
    )
    if function and part is None:
        raise SystemExit(f"{path} has no function {function}. To fix: one of its own")
    first, last = (part.lineno, part.end_lineno) if part else (1, len(text.splitlines()))
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # Docstrings: values that nothing uses.
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines & set(range(first, (last or first) + 1)))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        file, _, name = argument.partition(":")
        sys.stdout.write(f"{code_lines(Path(file), name):6}  {argument}\n")
