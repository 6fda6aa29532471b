"""Limits of size and depth of texts that a pod, a user or the cluster has written.

Everything of that kind is read by :mod:`ballast_policies.contract.decode` within one of these limits; ranges
of numbers and lengths of texts stand at the fields (``Field(ge=0, le=2**53)``).
"""

import codecs
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from ballast_policies.contract.errors import ContractError

MOST_STEP = 2**53
"""Largest step number: JSON readers that use doubles still tell neighbours apart."""

MOST_EPOCH = 2**31 - 1
"""Largest epoch of a plan, and number of a launch."""

MOST_EPOCH_READ = MOST_EPOCH // 2
"""Largest that is taken from an object; a larger one was written by hand, and left no room for later ones."""

MOST_LAYERS = 100_000
"""Most layers of a model, and so most stages."""

MOST_RANKS = 65_536
"""Most ranks of a gang."""

MOST_SLOW_RANKS = 64
"""Most ranks that a report names as slow."""

MOST_CANDIDATES = 8
"""Most plans that a gang tries."""

MOST_REPLICAS = 1024
"""Most replicas of a pipeline."""

MOST_MICROBATCHES = 65_536
"""Most microbatches of a step."""

MOST_SECONDS = 1e9
"""Longest time that a trainer may report: 30 years."""

MOST_RATE = 1e9
"""Most steps per second."""

LEAST_RATE = 1e-9
"""Steps/s below this are a stand-still and no measurement."""

LONGEST_NAME = 253
"""Characters of a Kubernetes name."""

LONGEST_REASON = 4096
"""Characters of a sentence that one side writes for the other's logs and conditions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a text of JSON.

    Attributes:
        most_bytes: of its UTF-8.
        depth: how deep objects and lists may be nested.
    """

    most_bytes: int
    depth: int = 32

    def problem(self, text: str) -> str:
        """Reason that the text is refused; empty: it is read."""
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > self.most_bytes:
            return f"{size} bytes, above {self.most_bytes}"
        if nested_deeper(text, self.depth):
            return f"nested deeper than {self.depth} levels"
        return ""

    def check_size(self, text: bytes | str) -> None:
        """Refuse a file that is longer. Raises ContractError."""
        if len(text) > self.most_bytes:
            raise ContractError(f"more than {self.most_bytes >> 20} MiB. To fix: a smaller file")

    def read(self, path: Path) -> str:
        """The text of a file. Raises OSError; ContractError, as :meth:`text`."""
        with path.open("rb") as file:
            return self.text(file)

    def text(self, file: BinaryIO) -> str:
        """The text that a file goes on with: of UTF-8 or, with its mark, UTF-16, in any locale.

        Raises:
            ContractError: longer, and no more of it was read, or no text.
        """
        data = file.read(self.most_bytes + 1)
        self.check_size(data)
        marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        try:
            return data.decode("utf-16" if marked else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise ContractError(f"not UTF-8: {error}. To fix: save it so") from error


MESSAGE = Limits(most_bytes=256 * 1024)
"""An annotation: Kubernetes allows this for all annotations of an object together."""

OBJECT = Limits(most_bytes=1024 * 1024)
"""A value in a ConfigMap: Kubernetes allows this for the whole object."""

PRICE = Limits(most_bytes=1024, depth=4)
"""One price of a price feed."""

FILE = Limits(most_bytes=64 * 1024 * 1024)
"""A file that a user names."""

# Ends at the end of the text where the closing quote is missing, so that no text takes quadratic time.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_STRUCTURE = b'[]{}"'
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def nested_deeper(text: str, depth: int) -> bool:
    """True if brackets outside of strings are nested deeper than ``depth``.

    Each round takes the innermost pairs away: a text that is not too deep ends soon, without a loop in Python
    over its brackets. What is left after ``depth`` rounds is deeper, or no JSON.
    """
    brackets = left = _brackets(text)
    for _ in range(depth):
        if not left:
            return False
        left = left.replace(b"[]", b" ").replace(b"{}", b" ").replace(b" ", b"")
    return bool(left) and _deepest(brackets) > depth


def _brackets(text: str) -> bytes:
    """The brackets outside of strings."""
    data = text.encode("utf-8", "surrogatepass")
    if b"\\" in data:  # without escapes each quote begins or ends a string; outside of strings there are none
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Most strings have no brackets.
    data = data.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    return _STRING.sub(b"", data).translate(None, _NO_BRACKET)


def _deepest(brackets: bytes) -> int:
    """The deepest nesting of brackets that may not match."""
    level = deepest = 0
    for bracket in brackets:
        level += 1 if bracket in b"[{" else -1
        deepest = max(deepest, level)
    return deepest


def value_deeper(value: Any, depth: int) -> bool:
    """True if objects and lists inside a value are nested deeper than ``depth``."""
    level = [value]
    for _ in range(depth + 1):
        # By identity: YAML may refer to one value many times.
        inside = {id(item): item for parent in level for item in _inside(parent)}
        level = list(inside.values())
        if not level:
            return False
    return True


def _inside(parent: Any) -> Iterable[Any]:
    if isinstance(parent, dict):
        return parent.values()
    return parent if isinstance(parent, list | tuple) else ()
