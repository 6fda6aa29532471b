"""What the API server answers, cut at a depth that every reader can walk.

A custom resource may hold JSON of any shape, and the API server takes ten thousand levels of it: Python's own
decoder gives up at a tenth of that, for a whole list or watch because of one object. Deeper values are
replaced by null here. The object that they belong to is refused when it is read: what is left of it is still
far deeper than a spec may be (:mod:`ballast_policies.contract.limits`).
"""

import json
import re
from typing import Any

from ballast_policies.contract.limits import nested_deeper

MOST_LEVELS = 100
"""Of an answer, with the levels of the list and the object around a value."""

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def read_json(data: bytes) -> Any:
    """A value of at most :data:`MOST_LEVELS` levels.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(shallow(data.decode()))


def shallow(text: str) -> str:
    """JSON with null in place of the values that are nested deeper than :data:`MOST_LEVELS`."""
    if text.count("{") + text.count("[") <= MOST_LEVELS or not nested_deeper(text, MOST_LEVELS):
        return text
    parts, kept_from, level = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("[", "{"):
            level += 1
            if level == MOST_LEVELS + 1:
                parts.append(text[kept_from : token.start()])
        elif token[0] in ("]", "}"):
            if level == MOST_LEVELS + 1:
                parts.append("null")
                kept_from = token.end()
            level -= 1
    # A text that ends below that is torn: what is returned is no JSON either.
    return "".join([*parts, text[kept_from:] if level <= MOST_LEVELS else ""])
