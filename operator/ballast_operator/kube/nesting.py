"""What the API server answers, cut at a depth that every reader can walk.

A custom resource may hold JSON of any shape, and the API server takes ten thousand levels of it: Python's own
decoder gives up at a tenth of that, for a whole list or watch because of one object. Deeper values are
replaced by null here. The object that they belong to is refused when it is read: what is left of it is still
far deeper than a spec may be (:mod:`ballast_policies.contract.limits`).
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
from aiohttp.connector import Connection
from ballast_policies.contract.limits import nested_deeper

MOST_LINE = 2**25
"""Bytes of one event; objects have a few million at most."""

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


class ShallowResponse(aiohttp.ClientResponse):
    """An answer whose JSON, whole or line by line, is cut as :func:`shallow` does it."""

    async def start(self, connection: Connection) -> Self:
        """Read the headers."""
        await super().start(connection)
        self.content = _ShallowLines(self.content)  # type: ignore[assignment]
        return self

    async def json(self, **_: Any) -> Any:
        """The decoded body."""
        return read_json(await self.read())


class _ShallowLines:
    """A stream of which ``iter_chunked`` gives whole lines; the rest is the stream's own."""

    def __init__(self, stream: asyncio.StreamReader | aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """One or more lines at a time, of JSON each; what is no text is given as it is.

        Raises:
            aiohttp.ClientPayloadError: a line does not end.
        """
        kept: list[bytes] = []
        async for data in self._stream.iter_chunked(size):  # type: ignore[union-attr]
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = b"".join([*kept, lines[0]])
                kept = []
                yield b"".join(_shallow_line(line) + b"\n" for line in lines)
            kept.append(rest)
            if sum(map(len, kept)) > MOST_LINE:
                raise aiohttp.ClientPayloadError(f"a line of more than {MOST_LINE} bytes")
        if last := b"".join(kept):
            yield _shallow_line(last)


def _shallow_line(line: bytes) -> bytes:
    try:
        return shallow(line.decode()).encode()
    except UnicodeDecodeError:
        return line
