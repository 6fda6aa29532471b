"""YAML of people, as ``kubectl`` reads it: ``1e-3`` is a number, ``12:30`` is a text, a key stands once.

Plain scalars are what resolve.go of go.yaml.in/yaml/v2, by which kubectl reads, takes them for.
PyYAML alone reads YAML 1.1, lets the last of two equal keys win, and spends hours on a few bytes of merges.
"""

import math
import re
from typing import Any

import yaml

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import OBJECT

_DEEPEST = 100
_MOST_MERGED = 10_000
"""Keys of one mapping; merges of merges would double them on each line."""

_INT, _FLOAT, _BOOL = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool"
_OTHERWISE = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value", _INT, _FLOAT, _BOOL)

_WHOLE = {
    base: re.compile(rf"[-+]?{digits}")
    for base, digits in {
        2: "0[bB][01]+",
        8: "0([oO]?[0-7]+)?",
        10: "[1-9][0-9]{0,19}",
        16: "0[xX][0-9a-fA-F]+",
    }.items()
}
"""Base -> integers as Go's ``strconv.ParseInt`` reads them."""

_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BETWEEN = re.compile(r"(?<=[0-9])_(?=[0-9])")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _number(text: str) -> int | float | None:
    """The number that a plain scalar is; None: it is none."""
    if not text or text[0] not in "+-.0123456789":
        return None
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    plain = _BETWEEN.sub("", text) if text[0] == "." else text.replace("_", "")
    for base, pattern in _WHOLE.items():
        found = int(plain, base) if pattern.fullmatch(plain) else None
        if found is not None and -(2**63) <= found < (2**63 if plain.startswith("+") else 2**64):
            return found
    number = float(plain) if _DECIMAL.fullmatch(plain) else math.inf
    return number if math.isfinite(number) else None


class _Loader(yaml.SafeLoader):
    """Refuses what is given twice, nested too deeply, or merged into too much."""

    _level = 0
    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in rows if tag not in _OTHERWISE]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._level += 1
        if self._level > _DEEPEST:
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {_DEEPEST} levels", self.get_mark()
            )
        try:
            return super().compose_node(parent, index)
        finally:
            self._level -= 1

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return node

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> Any:
        number = _number(value) if kind is yaml.ScalarNode and implicit[0] else None
        if number is not None:
            return _INT if isinstance(number, int) else _FLOAT
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        return {_key(key): value for key, value in super().construct_mapping(node, deep).items()}

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_MERGED:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_MERGED} keys, with merged ones", node.start_mark
            )


def _key(key: object) -> object:
    """A key as text, as in JSON."""
    if isinstance(key, bool):
        return str(key).lower()
    return f"{key:.15g}" if isinstance(key, float) else str(key) if isinstance(key, int) else key


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    found = _number(loader.construct_scalar(node))
    if found is None or (node.tag == _INT and isinstance(found, float)):
        raise yaml.constructor.ConstructorError(None, None, f"{node.value!r} is no number", node.start_mark)
    return found


_Loader.add_implicit_resolver(
    _BOOL,
    re.compile("(y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON|n|N|no|No|NO|false|False|FALSE|off|Off|OFF)$"),
    list("yYnNtTfFoO"),
)
for _tag in (_INT, _FLOAT):
    _Loader.add_constructor(_tag, _construct_number)


def parse_yaml(text: str) -> Any:
    """The one document of a text, which may be JSON; None: it has none.

    Raises:
        ContractError: neither YAML nor JSON, several documents, above the limits, or a key is given twice.
    """
    documents = parse_documents(text)
    if len(documents) > 1:
        raise ContractError(f"{len(documents)} documents where one is read. To fix: a file for each")
    return documents[0] if documents else None


def parse_documents(text: str) -> list[Any]:
    """The documents of a text that are not empty. Raises ContractError, as :func:`parse_yaml`."""
    if text[:80].lstrip().startswith("{"):
        try:
            return [parse_json(text)]  # in which tabs indent, and escapes may be halves of characters
        except ContractError:
            if len(text) > OBJECT.most_bytes:
                raise
            # A mapping of YAML may begin so, too.
    OBJECT.check_size(text)
    try:
        return [found for found in yaml.load_all(text, _Loader) if found is not None]
    # Impossible tags, and what is no text.
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise ContractError(f"not YAML: {' '.join(str(error).split()):.300}. To fix: correct it") from error
