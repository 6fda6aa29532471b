"""YAML of people, as ``kubectl`` reads it: ``1e-3`` is a number, ``12:30`` is a text, a key stands once.

PyYAML alone reads YAML 1.1, lets the last of two equal keys win, and spends hours on a few bytes of merges.
"""

import re
from typing import Any

import yaml

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import OBJECT, Limits

_DEEPEST = 100
_MOST_MERGED = 10_000
"""Keys of one mapping; merges of merges would double them on each line."""

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_UNLIKE_JSON = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value", _INT, _FLOAT)


class _Loader(yaml.SafeLoader):
    """Refuses what is given twice, nested too deeply, or merged into too much."""

    _level = 0
    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in rows if tag not in _UNLIKE_JSON]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_MERGED:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_MERGED} keys, with merged ones", node.start_mark
            )


_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(0b[01_]+|0o?[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?([0-9][0-9_]*\.?[0-9_]*[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*|\.[0-9]+([eE][-+]?[0-9]+)?"
        r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def parse_yaml(text: str, *, limits: Limits = OBJECT) -> Any:
    """The one document of a text, which may be JSON; None: it has none.

    Raises:
        ContractError: neither YAML nor JSON, several documents, above the limits, or a key is given twice.
    """
    documents = parse_documents(text, limits=limits)
    if len(documents) > 1:
        raise ContractError(f"{len(documents)} documents where one is read. To fix: a file for each")
    return documents[0] if documents else None


def parse_documents(text: str, *, limits: Limits = OBJECT) -> list[Any]:
    """The documents of a text that are not empty. Raises ContractError, as :func:`parse_yaml`."""
    if text[:80].lstrip().startswith("{"):
        try:
            return [parse_json(text)]  # in which tabs indent, and escapes may be halves of characters
        except ContractError:
            if len(text) > limits.most_bytes:
                raise
            # A mapping of YAML may begin so, too.
    limits.check_size(text)
    try:
        return [found for found in yaml.load_all(text, _Loader) if found is not None]
    # Impossible tags, what is no text, a number of thousands of digits.
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise ContractError(f"not YAML: {' '.join(str(error).split()):.300}. To fix: correct it") from error
